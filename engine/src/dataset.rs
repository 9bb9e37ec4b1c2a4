//! Calibration and evaluation data: a plain text or JSON lines, cut into token windows by the recipe of the reference.
//!
//! A window is at most so many tokens, the beginning-of-text token included; every token but the first is predicted from those before it.
//! `calibrate` and `verify` call it. It never trusts the file: size, encoding, shape and length are checked, and errors name the line.

pub mod mix;
mod pieces;
mod rows;
mod spread;

use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use self::rows::{Body, Row};
pub use self::spread::{sample, sample_of_round};
use crate::chat::ChatMessage;
use crate::error::{Error, Result};
use crate::files;
use crate::tokenizer::{Special, Tokenizer};

/// Larger files are refused: a calibration or evaluation set has a few megabytes.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Longer lines are refused: what JSON makes of one may take a hundred times its bytes in memory.
const MAX_LINE_BYTES: usize = 4 << 20;

/// What the data needs to know of a tokenizer.
pub trait Encode {
    /// Token ids of `text`; names of control tokens in it become single ids; nothing is added in front.
    fn ids(&self, text: &str) -> Result<Vec<u32>>;
    /// The token that begins a text, when the model has one.
    fn bos(&self) -> Option<u32>;
    /// Token ids are below it.
    fn vocab_size(&self) -> usize;
    /// Token ids of a conversation, as the model's chat template writes it.
    fn conversation(&self, messages: &Value) -> Result<Vec<u32>>;
}

impl Encode for Tokenizer {
    fn ids(&self, text: &str) -> Result<Vec<u32>> {
        self.encode(text, Special::None)
    }

    fn bos(&self) -> Option<u32> {
        self.bos()
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size()
    }

    fn conversation(&self, messages: &Value) -> Result<Vec<u32>> {
        let messages = Vec::<ChatMessage>::deserialize(messages)
            .map_err(|error| Error::data(format!("`messages` cannot be used ({error})")))?;
        self.encode_chat(&messages)
    }
}

/// A data file, read and checked, not yet cut into windows.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// The file's name for messages.
    name: String,
    content: Content,
}

#[derive(Debug, Clone, PartialEq)]
enum Content {
    /// One long text; windows follow one another.
    Text(String),
    /// One document a line; a window is the head of a document.
    Rows(Vec<Row>),
}

/// Tokens to run through the model in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// At least two ids. The first is only context, all later ones are predicted.
    pub ids: Vec<u32>,
    /// The report's slice: the row's `kind` or `task`. Plain text has none.
    pub slice: Option<String>,
}

impl Dataset {
    /// Reads and checks a data file. `.jsonl` is JSON lines and `.txt` or `.md` is text; with any other name a file that starts with `{` is JSON lines.
    ///
    /// # Errors
    /// A missing, empty, too large or badly encoded file, and the first line that is not a usable row.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let content = files::read(path, MAX_FILE_BYTES).map_err(|error| {
            let fix = match error.kind() {
                ErrorKind::FileTooLarge => ": take a sample of it",
                _ => "",
            };
            Error::data(format!("cannot read the data file {name}: {error}{fix}"))
        })?;
        let text = String::from_utf8(content).map_err(|error| {
            let valid = error.utf8_error().valid_up_to();
            let line = error.as_bytes()[..valid]
                .split(|&byte| byte == b'\n')
                .count();
            Error::data(format!(
                "{name} is not UTF-8 at line {line} (byte {valid}): convert it to UTF-8"
            ))
        })?;
        let extension = path
            .extension()
            .and_then(|extension| extension.to_str())
            .unwrap_or_default();
        Self::parse(name, extension, text)
    }

    fn parse(name: String, extension: &str, mut text: String) -> Result<Self> {
        if text.starts_with('\u{feff}') {
            text.remove(0);
        }
        if text.trim().is_empty() {
            return Err(Error::data(format!(
                "{name} is empty: give a text or JSON lines with `text`, `messages`, `tokens`, or `prompt` and `answer`"
            )));
        }
        let json_lines = match extension {
            "jsonl" | "ndjson" => true,
            "txt" | "md" => false,
            _ => text.trim_start().starts_with('{'),
        };
        if !json_lines {
            return Ok(Self {
                name,
                content: Content::Text(text),
            });
        }
        Ok(Self {
            content: Content::Rows(rows(&name, &text, rows::parse)?),
            name,
        })
    }

    /// All windows of at most `window` tokens that have something to predict.
    ///
    /// # Errors
    /// A window under two tokens, or data too short for a single one.
    pub fn windows(&self, tokenizer: &dyn Encode, window: usize) -> Result<Vec<Window>> {
        if window < 2 {
            return Err(Error::data(format!(
                "a window of {window} tokens predicts nothing: take at least 2"
            )));
        }
        let windows = match &self.content {
            Content::Text(text) => {
                let ids = pieces::ids(text, tokenizer, pieces::PIECE_BYTES)
                    .map_err(|error| Error::data(format!("{}: {}", self.name, error.message)))?;
                text_windows(&ids, tokenizer.bos(), window)
            }
            Content::Rows(rows) => self.row_windows(rows, tokenizer, window)?,
        };
        if windows.is_empty() {
            return Err(Error::data(format!(
                "{} is too short for one window of {window} tokens: add text or take a smaller window",
                self.name
            )));
        }
        Ok(windows)
    }

    fn row_windows(
        &self,
        rows: &[Row],
        tokenizer: &dyn Encode,
        window: usize,
    ) -> Result<Vec<Window>> {
        let mut windows = Vec::with_capacity(rows.len());
        for row in rows {
            let ids = match &row.body {
                Body::Text(text) => tokenizer.ids(text),
                Body::Messages(messages) => tokenizer.conversation(messages),
                Body::Tokens(ids) => in_vocabulary(ids, tokenizer.vocab_size()),
            };
            let mut ids = ids.map_err(|error| {
                Error::data(format!(
                    "{} line {}: {}",
                    self.name, row.line, error.message
                ))
            })?;
            // A chat template writes the beginning-of-text token itself.
            if let Some(bos) = tokenizer.bos().filter(|&bos| ids.first() != Some(&bos)) {
                ids.insert(0, bos);
            }
            ids.truncate(window);
            if ids.len() < 2 {
                return Err(Error::data(format!(
                    "{} line {}: {} tokens predict nothing: lengthen the text or remove the line",
                    self.name,
                    row.line,
                    ids.len()
                )));
            }
            windows.push(Window {
                ids,
                slice: row.slice.clone(),
            });
        }
        Ok(windows)
    }

    /// Whether two files hold the same texts, under whatever names.
    pub fn same_content(&self, other: &Self) -> bool {
        self.content == other.content
    }

    /// The file's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// What `parse` makes of each line that is not empty, by its number from 1.
///
/// # Errors
/// The first line that is too long or that `parse` refuses.
pub(crate) fn rows<T>(
    name: &str,
    text: &str,
    parse: impl Fn(usize, &str) -> Result<T, String>,
) -> Result<Vec<T>> {
    let lines = (1..).zip(text.lines());
    let rows = lines
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(number, line)| {
            let row = if line.len() > MAX_LINE_BYTES {
                Err(format!(
                    "{} bytes, more than {MAX_LINE_BYTES}: cut the document into several lines",
                    line.len()
                ))
            } else {
                parse(number, line)
            };
            row.map_err(|why| Error::data(format!("{name} line {number}: {why}")))
        });
    rows.collect()
}

/// Chunks of the whole text without overlap, each behind the beginning-of-text token; the last partial one is dropped.
fn text_windows(ids: &[u32], bos: Option<u32>, window: usize) -> Vec<Window> {
    let chunk = window - usize::from(bos.is_some());
    ids.chunks_exact(chunk)
        .map(|chunk| Window {
            ids: bos.into_iter().chain(chunk.iter().copied()).collect(),
            slice: None,
        })
        .collect()
}

/// Token ids that the model has a row for.
fn in_vocabulary(ids: &[u32], vocab_size: usize) -> Result<Vec<u32>> {
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        Some(id) => Err(Error::data(format!(
            "token id {id} is outside the vocabulary of {vocab_size}: the tokens are of another model"
        ))),
        None => Ok(ids.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// One token a byte, 1000 in front.
    struct Bytes;

    impl Encode for Bytes {
        fn ids(&self, text: &str) -> Result<Vec<u32>> {
            Ok(text.bytes().map(u32::from).collect())
        }

        fn bos(&self) -> Option<u32> {
            Some(1000)
        }

        fn vocab_size(&self) -> usize {
            1001
        }

        fn conversation(&self, messages: &Value) -> Result<Vec<u32>> {
            self.ids(messages[0]["content"].as_str().unwrap_or_default())
        }
    }

    fn parse(extension: &str, text: &str) -> Result<Dataset> {
        Dataset::parse("data".into(), extension, text.to_owned())
    }

    fn texts(windows: &[Window]) -> Vec<String> {
        windows
            .iter()
            .map(|window| {
                window.ids[1..]
                    .iter()
                    .map(|&id| char::from_u32(id).unwrap())
                    .collect()
            })
            .collect()
    }

    #[test]
    fn a_text_is_cut_without_overlap_and_the_partial_end_is_dropped() {
        let windows = parse("txt", "abcdefgh")
            .unwrap()
            .windows(&Bytes, 4)
            .unwrap();
        assert_eq!(texts(&windows), ["abc", "def"]);
        assert!(
            windows
                .iter()
                .all(|window| window.ids[0] == 1000 && window.slice.is_none())
        );
    }

    #[test]
    fn each_row_is_its_own_document_cut_to_the_window() {
        let rows = "{\"text\": \"abcdef\", \"kind\": \"k\"}\n\n{\"prompt\": \"q:\", \"answer\": \"a\", \"task\": \"t\", \"id\": 3}\n{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n\n";
        let windows = parse("jsonl", rows).unwrap().windows(&Bytes, 5).unwrap();
        assert_eq!(texts(&windows), ["abcd", "q: a", "hi"]);
        assert_eq!(
            windows
                .iter()
                .map(|window| window.slice.as_deref())
                .collect::<Vec<_>>(),
            [Some("k"), Some("t"), None]
        );
    }

    #[test]
    fn a_bad_row_is_named_by_its_line_in_the_file() {
        for (text, wanted) in [
            ("{\"text\": \"a\"}\n{\"text\": ", "data line 2: not JSON"),
            ("{\"text\": \"a\"}\n\n[1]", "data line 3: not a JSON object"),
            (" \n\t", "data is empty"),
            (
                &format!("{{\"text\": \"a\"}}\n[{}]", "1,".repeat(2 << 20)),
                "data line 2: 4194306 bytes, more than 4194304: cut the document",
            ),
        ] {
            let error = parse("jsonl", text).unwrap_err().message;
            assert!(error.starts_with(wanted), "{error}");
        }
    }

    #[test]
    fn too_little_data_is_refused_with_the_number_there_is() {
        assert!(
            parse("txt", "ab")
                .unwrap()
                .windows(&Bytes, 4)
                .unwrap_err()
                .message
                .contains("too short for one window of 4 tokens")
        );
        assert!(
            parse("txt", "ab")
                .unwrap()
                .windows(&Bytes, 1)
                .unwrap_err()
                .message
                .contains("predicts nothing")
        );
        assert!(
            parse("jsonl", "{\"text\": \"ab\"}\n{\"tokens\": []}")
                .unwrap()
                .windows(&Bytes, 4)
                .unwrap_err()
                .message
                .contains("data line 2: 1 tokens predict nothing")
        );
        let windows = parse("txt", "abcdefgh")
            .unwrap()
            .windows(&Bytes, 3)
            .unwrap();
        let error = sample("data", windows, 5).unwrap_err().message;
        assert_eq!(
            error,
            "data gives only 4 samples and 5 were asked for: ask for at most 4 or add data"
        );
    }

    #[test]
    fn token_ids_are_taken_as_they_are_and_those_of_another_model_are_refused_by_line() {
        let rows = "{\"tokens\": [1000, 97, 98], \"kind\": \"x\"}\n{\"tokens\": [99]}";
        let windows = parse("jsonl", rows).unwrap().windows(&Bytes, 8).unwrap();
        assert_eq!(texts(&windows), ["ab", "c"]);
        let error = parse("jsonl", "{\"tokens\": [1, 1001]}")
            .unwrap()
            .windows(&Bytes, 8)
            .unwrap_err();
        assert!(
            error
                .message
                .contains("data line 1: token id 1001 is outside the vocabulary of 1001"),
            "{error}"
        );
    }

    #[test]
    fn a_sample_is_spread_over_the_file_and_the_rest_is_disjoint() {
        let windows = parse("txt", "abcdefghij")
            .unwrap()
            .windows(&Bytes, 2)
            .unwrap();
        let (chosen, rest) = sample("data", windows, 4).unwrap();
        assert_eq!(texts(&chosen), ["a", "c", "f", "h"]);
        assert_eq!(texts(&rest), ["b", "d", "e", "g", "i", "j"]);
    }

    #[test]
    fn another_round_reads_others_where_there_are_any() {
        let windows = |text: &str| parse("txt", text).unwrap().windows(&Bytes, 2).unwrap();
        let round = |round| {
            let (chosen, rest) = sample_of_round("data", windows("abcdefghij"), 4, round).unwrap();
            assert_eq!(rest.len(), 6);
            texts(&chosen).concat()
        };
        assert_eq!(
            [0, 1, 3, 10].map(round),
            ["acfh", "bdgi", "adfi", "acfh"],
            "in the file's order"
        );
        let all = |round| {
            sample_of_round("data", windows("abcd"), 4, round)
                .unwrap()
                .0
        };
        assert_eq!(
            texts(&all(0)),
            texts(&all(3)),
            "all of them are all of them"
        );
    }

    #[test]
    fn the_kind_of_file_is_told_by_its_name_and_else_by_its_first_character() {
        assert!(matches!(
            parse("txt", "{\"text\": 1").unwrap().content,
            Content::Text(_)
        ));
        assert!(matches!(
            parse("", "  {\"text\": \"a\"}").unwrap().content,
            Content::Rows(_)
        ));
        assert!(matches!(
            parse("", "hello").unwrap().content,
            Content::Text(_)
        ));
    }

    #[test]
    fn a_file_that_is_not_utf8_is_refused_by_line() {
        let file = tempfile::Builder::new()
            .suffix(".jsonl")
            .tempfile()
            .unwrap();
        fs::write(file.path(), b"{\"text\": \"a\"}\n\xff").unwrap();
        assert!(
            Dataset::read(file.path())
                .unwrap_err()
                .message
                .contains("is not UTF-8 at line 2 (byte 14)")
        );
        assert!(
            Dataset::read(&file.path().with_extension("missing"))
                .unwrap_err()
                .message
                .contains("cannot read the data file")
        );
    }
}
