//! One JSON line of a data file: which fields make a text, and what is refused. Pure.

use serde::Deserialize;
use serde_json::Value;

/// A slice's name is cut to so many characters, so that a report fits its 4 KiB.
const MAX_SLICE_CHARS: usize = 64;

/// A JSON line, checked.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// Its line in the file, from 1.
    pub(super) line: usize,
    /// What is tokenised.
    pub(super) body: Body,
    /// `kind` or `task`.
    pub(super) slice: Option<String>,
}

/// The text of a row.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Body {
    /// As it is.
    Text(String),
    /// A list of messages for the chat template.
    Messages(Value),
    /// Token ids, made elsewhere.
    Tokens(Vec<u32>),
}

/// A JSON line. Other fields are the author's own and are left alone.
#[derive(Deserialize)]
struct RawRow {
    text: Option<String>,
    prompt: Option<String>,
    answer: Option<String>,
    messages: Option<Value>,
    tokens: Option<Value>,
    kind: Option<String>,
    task: Option<String>,
}

/// Parses the line with the number `line`.
///
/// # Errors
/// What is wrong with it, without its number.
pub(super) fn parse(line: usize, text: &str) -> Result<Row, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| {
        // The parser counts lines within the row; the caller names the line of the file.
        let why = error.to_string();
        format!(
            "not JSON ({} at column {})",
            why.split(" at line ").next().unwrap_or(&why),
            error.column()
        )
    })?;
    let Value::Object(fields) = &value else {
        return Err("not a JSON object: write one object a line".into());
    };
    let raw = RawRow::deserialize(&value)
        .map_err(|error| format!("a field has the wrong type ({error})"))?;
    let body = match raw {
        RawRow {
            text: Some(text), ..
        } if text.trim().is_empty() => return Err("`text` is empty: remove the line".into()),
        RawRow {
            text: Some(text), ..
        } => Body::Text(text),
        RawRow {
            prompt: Some(prompt),
            answer: Some(answer),
            ..
        } => Body::Text(join(prompt, &answer)),
        RawRow {
            messages: Some(messages @ Value::Array(_)),
            ..
        } => Body::Messages(messages),
        RawRow {
            messages: Some(_), ..
        } => return Err("`messages` is not a list of messages".into()),
        RawRow {
            tokens: Some(tokens),
            ..
        } => Body::Tokens(Vec::deserialize(&tokens).map_err(|_| {
            "`tokens` is not a list of token ids: write whole numbers from 0 on".to_owned()
        })?),
        RawRow {
            prompt: Some(_), ..
        } => return Err("`prompt` has no `answer` beside it".into()),
        _ => {
            let names: Vec<String> = fields.keys().take(8).map(|name| printable(name)).collect();
            let names = names.join(", ");
            return Err(format!(
                "has none of `text`, `messages`, `tokens`, or `prompt` and `answer`; its fields are: {names}"
            ));
        }
    };
    let slice = raw
        .kind
        .or(raw.task)
        .map(|name| name.chars().take(MAX_SLICE_CHARS).collect());
    Ok(Row { line, body, slice })
}

/// Answers are stored without the space that the model writes before them.
fn join(mut prompt: String, answer: &str) -> String {
    if !prompt.ends_with(char::is_whitespace) && !answer.starts_with(char::is_whitespace) {
        prompt.push(' ');
    }
    prompt.push_str(answer);
    prompt
}

/// The author's names may be anything; a message is one short line.
fn printable(name: &str) -> String {
    name.chars()
        .filter(|character| !character.is_control())
        .take(40)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_rows_are_refused_with_the_reason_in_one_line() {
        for (text, wanted) in [
            (
                "{\"text\": ",
                "not JSON (EOF while parsing a value at column 9)",
            ),
            ("[1]", "not a JSON object"),
            (
                "{\"txt\": \"a\", \"b\\n\": 1}",
                "has none of `text`, `messages`, `tokens`, or `prompt` and `answer`; its fields are: b, txt",
            ),
            ("{}", "has none of"),
            ("{\"prompt\": \"a\"}", "`prompt` has no `answer`"),
            ("{\"text\": 1}", "a field has the wrong type"),
            ("{\"messages\": \"a\"}", "`messages` is not a list"),
            ("{\"text\": \" \\n\"}", "`text` is empty"),
            (
                "{\"tokens\": [1, -1]}",
                "`tokens` is not a list of token ids",
            ),
            (
                "{\"tokens\": [4294967296]}",
                "`tokens` is not a list of token ids",
            ),
            ("{\"tokens\": \"a\"}", "`tokens` is not a list of token ids"),
        ] {
            let why = parse(1, text).unwrap_err();
            assert!(why.starts_with(wanted), "{why}");
            assert!(!why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn a_deep_json_bomb_is_an_error_and_not_a_crash() {
        let bomb = format!("{{\"text\": {}", "[".repeat(1 << 20));
        assert!(parse(1, &bomb).unwrap_err().contains("not JSON"));
    }

    #[test]
    fn text_comes_before_prompt_and_answer_and_these_before_messages() {
        let body = |text: String| parse(1, &text).unwrap().body;
        let messages = "\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]";
        let answer = "\"prompt\": \"p\", \"answer\": \"a\"";
        assert_eq!(
            body(format!("{{{messages}, {answer}, \"text\": \"t\"}}")),
            Body::Text("t".into())
        );
        assert_eq!(
            body(format!("{{{messages}, {answer}}}")),
            Body::Text("p a".into())
        );
        assert!(matches!(body(format!("{{{messages}}}")), Body::Messages(_)));
    }

    #[test]
    fn a_slice_is_cut_so_that_a_report_stays_small() {
        let row = parse(
            1,
            &format!("{{\"text\": \"t\", \"kind\": \"{}\"}}", "k".repeat(1000)),
        );
        assert_eq!(
            row.unwrap().slice.map(|slice| slice.len()),
            Some(MAX_SLICE_CHARS)
        );
    }
}
