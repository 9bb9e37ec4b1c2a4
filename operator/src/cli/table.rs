//! Text for a terminal or a file: columns, colours only where asked for, and no control character that a cluster's objects might carry.

use std::fmt::Write as _;

/// What a text tells, as a colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// No colour.
    Plain,
    /// As it should be.
    Good,
    /// Wrong.
    Bad,
    /// Under way.
    Busy,
    /// Less important.
    Faint,
}

/// How text is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// With ANSI colours.
    pub colours: bool,
}

impl Style {
    /// Without colours.
    pub const PLAIN: Self = Self { colours: false };

    /// `text` in a tone; control characters are taken out first.
    pub fn paint(self, tone: Tone, text: &str) -> String {
        let text = clean(text);
        let code = match tone {
            Tone::Good => 32,
            Tone::Bad => 31,
            Tone::Busy => 33,
            Tone::Faint => 2,
            Tone::Plain => return text,
        };
        if self.colours && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text
        }
    }
}

/// `text` without control characters and without marks that turn the direction of writing: a status is data, not a program for a terminal.
pub fn clean(text: &str) -> String {
    let harmful = |c: char| {
        (c.is_control() && c != '\n' && c != '\t')
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.chars()
        .map(|c| if harmful(c) { '\u{fffd}' } else { c })
        .collect()
}

/// Writes `more` behind `text`.
///
/// # Panics
/// Never: a `String` takes everything.
pub fn push(text: &mut String, more: impl std::fmt::Display) {
    write!(text, "{more}").expect("writing to a String cannot fail");
}

/// Each line after two spaces.
pub fn indented(lines: &[String], style: Style) -> String {
    let mut text = String::new();
    for line in lines {
        push(
            &mut text,
            format_args!("  {}\n", style.paint(Tone::Plain, line)),
        );
    }
    text
}

/// One field of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// A field in a tone. A line break would break the table: it becomes a space.
    pub fn new(text: impl Into<String>, tone: Tone) -> Self {
        let text: String = text.into();
        Self {
            text: clean(&text.replace(['\n', '\t'], " ")),
            tone,
        }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(text, Tone::Plain)
    }
}

/// Columns two spaces apart, as wide as their widest field; the last is not filled up.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with this first row.
    pub fn with_header(header: &[&str]) -> Self {
        let cells = header.iter().map(|title| Cell::from(*title)).collect();
        Self { rows: vec![cells] }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: Vec<Cell>) {
        self.rows.push(cells);
    }

    /// The lines, each after `indent` spaces.
    pub fn render(&self, style: Style, indent: usize) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                let cells = self.rows.iter().filter_map(|row| row.get(column));
                cells
                    .map(|cell| cell.text.chars().count())
                    .max()
                    .unwrap_or(0)
            })
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = " ".repeat(indent);
            for (column, cell) in row.iter().enumerate() {
                line += &style.paint(cell.tone, &cell.text);
                if column + 1 < row.len() {
                    let missing = widths[column] - cell.text.chars().count();
                    line += &" ".repeat(missing + 2);
                }
            }
            push(&mut text, format_args!("{}\n", line.trim_end()));
        }
        text
    }
}

/// `seconds` as people say it: `42s`, `5m`, `3h`, `2d`.
pub fn span(seconds: i64) -> String {
    match seconds.max(0) {
        seconds @ 0..=119 => format!("{seconds}s"),
        seconds @ 120..=7199 => format!("{}m", seconds / 60),
        seconds @ 7200..=172_799 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86400),
    }
}

/// `seconds` to the second: `2m35s`, `1h`, `0s`.
pub fn exact(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let parts = [
        (seconds / 3600, "h"),
        (seconds / 60 % 60, "m"),
        (seconds % 60, "s"),
    ];
    let mut text = String::new();
    for (count, unit) in parts.into_iter().filter(|(count, _)| *count > 0) {
        push(&mut text, format_args!("{count}{unit}"));
    }
    if text.is_empty() { "0s".into() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_field_and_nothing_trails() {
        let mut table = Table::with_header(&["NAME", "READY"]);
        table.row(vec!["a-long-name".into(), "True".into()]);
        table.row(vec!["b".into(), "".into()]);
        let text = table.render(Style::PLAIN, 0);
        assert_eq!(text, "NAME         READY\na-long-name  True\nb\n");
    }

    #[test]
    fn colours_do_not_move_columns() {
        let mut table = Table::default();
        table.row(vec![Cell::new("True", Tone::Good), "x".into()]);
        table.row(vec!["Unknown".into(), "y".into()]);
        let text = table.render(Style { colours: true }, 2);
        assert_eq!(text, "  \x1b[32mTrue\x1b[0m     x\n  Unknown  y\n");
    }

    #[test]
    fn an_objects_text_cannot_steer_the_terminal() {
        let painted = Style { colours: true }.paint(Tone::Plain, "a\x1b[2Jb\u{202e}c\r");
        assert_eq!(painted, "a\u{fffd}[2Jb\u{fffd}c\u{fffd}");
        let mut table = Table::default();
        table.row(vec!["a\nb".into()]);
        assert_eq!(table.render(Style::PLAIN, 0), "a b\n");
    }

    #[test]
    fn spans_are_short() {
        let table = [
            (-5, "0s"),
            (119, "119s"),
            (120, "2m"),
            (7200, "2h"),
            (172_800, "2d"),
        ];
        for (seconds, text) in table {
            assert_eq!(span(seconds), text);
        }
        let table = [
            (0, "0s"),
            (155, "2m35s"),
            (600, "10m"),
            (3605, "1h5s"),
            (-1, "0s"),
        ];
        for (seconds, text) in table {
            assert_eq!(exact(seconds), text);
        }
    }
}
