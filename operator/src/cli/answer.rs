//! An answer and how it is written: plain text for people, JSON or YAML for programs, with the exit code that says it to a script.

use std::io::{self, Write};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;

use super::Exit;
use super::table::Style;

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// Text for people.
    #[default]
    Plain,
    /// One JSON document.
    Json,
    /// One YAML document.
    Yaml,
}

/// Something that people can read.
pub trait Plain {
    /// The text, ending in a line break.
    fn plain(&self, style: Style) -> String;
}

/// What a command found out.
pub struct Answer {
    /// For people.
    pub text: String,
    /// For programs.
    pub value: Value,
    /// For scripts.
    pub exit: Exit,
}

impl Answer {
    /// The answer that `found` is.
    ///
    /// # Panics
    /// Never: what commands find is plain data.
    pub fn new<T: Serialize + Plain>(found: &T, style: Style, exit: Exit) -> Self {
        Self {
            text: found.plain(style),
            value: serde_json::to_value(found).expect("an answer is plain data"),
            exit,
        }
    }

    /// Writes it.
    ///
    /// # Errors
    /// When it cannot be written; a reader that has gone away (`| head`) is none.
    pub fn write(&self, format: Format, out: &mut impl Write) -> io::Result<()> {
        let text = match format {
            Format::Plain => self.text.clone(),
            Format::Json => format!("{:#}\n", self.value),
            Format::Yaml => serde_norway::to_string(&self.value).map_err(io::Error::other)?,
        };
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn programs_get_one_document_that_reads_back() {
        let answer = Answer {
            text: "chat is ready\n".into(),
            value: json!({"name": "chat", "steps": [1, 2]}),
            exit: Exit::Done,
        };
        let written = |format| {
            let mut out = Vec::new();
            answer.write(format, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(Format::Plain), "chat is ready\n");
        let json: Value = serde_json::from_str(&written(Format::Json)).unwrap();
        let yaml: Value = serde_norway::from_str(&written(Format::Yaml)).unwrap();
        assert_eq!((&json, &yaml), (&answer.value, &answer.value));
    }

    #[test]
    fn a_reader_that_went_away_is_no_error() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let answer = Answer {
            text: "x".into(),
            value: Value::Null,
            exit: Exit::Done,
        };
        assert!(answer.write(Format::Plain, &mut Gone).is_ok());
    }
}
