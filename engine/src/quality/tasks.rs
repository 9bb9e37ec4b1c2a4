//! Questions with exact answers: one JSON object a line with `prompt` and `answer`, answered greedily.
//!
//! The recipe of the reference: the prompt with its control tokens, the most likely token at most `max_new_tokens` times, cut at the first stop
//! string, white space stripped.

use std::path::Path;

use serde::Deserialize;

use crate::dataset;
use crate::error::{Error, Result};
use crate::files;
use crate::model::{Chunk, LogitRows, Model, Pass, Workspace};
use crate::tokenizer::{Special, Tokenizer};

/// Larger files are refused.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// Longer answers are refused: a question has a short, exact one.
const MAX_ANSWER_TOKENS: usize = 256;

/// One question. Other fields are the author's own.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Task {
    /// The text up to the answer.
    pub prompt: String,
    /// What must come.
    pub answer: String,
    /// Tokens at most.
    #[serde(default = "default_tokens")]
    pub max_new_tokens: usize,
    /// The answer ends before any of these.
    #[serde(default = "default_stop")]
    pub stop: Vec<String>,
}

fn default_tokens() -> usize {
    16
}

fn default_stop() -> Vec<String> {
    vec!["\n".into()]
}

/// Reads the questions, or so many spread over the file.
///
/// # Errors
/// A file that cannot be read, the first line that is not a question, or fewer of them than asked for.
pub fn read(path: &Path, count: Option<usize>) -> Result<Vec<Task>> {
    let name = path.display();
    let cannot = |error: std::io::Error| Error::data(format!("cannot read {name}: {error}"));
    let text = files::read_text(path, MAX_FILE_BYTES).map_err(cannot)?;
    let tasks = dataset::rows(&name.to_string(), &text, |_, line| parse(line))?;
    let count = count.unwrap_or(tasks.len());
    if count == 0 || count > tasks.len() {
        return Err(Error::data(format!(
            "{name} has {} questions and {count} were asked for",
            tasks.len()
        )));
    }
    Ok((0..count)
        .map(|index| tasks[index * tasks.len() / count].clone())
        .collect())
}

fn parse(line: &str) -> Result<Task, String> {
    let task: Task = serde_json::from_str(line)
        .map_err(|error| format!("not a question with `prompt` and `answer` ({error})"))?;
    if task.max_new_tokens == 0 || task.max_new_tokens > MAX_ANSWER_TOKENS {
        return Err(format!(
            "max_new_tokens is {}: write 1 to {MAX_ANSWER_TOKENS}",
            task.max_new_tokens
        ));
    }
    if task.stop.iter().any(String::is_empty) {
        return Err("a stop string is empty".into());
    }
    Ok(task)
}

/// The answer of a model that reads the prompt as `reading` and generates as `decoding`; both are of one checkpoint.
///
/// # Errors
/// A prompt that does not fit the context.
pub fn answer(
    reading: &Model,
    decoding: &Model,
    tokenizer: &Tokenizer,
    task: &Task,
) -> Result<String> {
    let mut ids = tokenizer.encode(&task.prompt, Special::Add)?;
    let mut cache = reading.new_cache(ids.len() + task.max_new_tokens);
    let mut workspace = Workspace::default();
    let mut answer = Vec::new();
    let mut text = String::new();
    for step in 0..task.max_new_tokens {
        let model = if step == 0 { reading } else { decoding };
        let chunk = Chunk {
            tokens: &ids,
            cache: &mut cache,
            logits: LogitRows::Last,
        };
        let logits = model.forward(Pass::Precise, &mut [chunk], &mut workspace, None)?;
        let next = most_likely(logits);
        if model.config().eos_token_ids.contains(&next) {
            break;
        }
        answer.push(next);
        text = tokenizer.decode_all(&answer);
        if task.stop.iter().any(|stop| text.contains(stop)) {
            break;
        }
        ids = vec![next];
    }
    let end = task.stop.iter().filter_map(|stop| text.find(stop)).min();
    Ok(text[..end.unwrap_or(text.len())].trim().to_owned())
}

/// The first index of the largest logit.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a vocabulary has far fewer than 2^32 tokens"
)]
fn most_likely(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (index, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = index;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn questions_are_read_and_bad_ones_are_refused_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tasks.jsonl");
        let good = "{\"prompt\": \"p\", \"answer\": \"a\", \"id\": 3}\n";
        fs::write(&path, good.repeat(5)).unwrap();
        let tasks = read(&path, Some(2)).unwrap();
        assert_eq!((tasks.len(), tasks[0].max_new_tokens), (2, 16));
        assert!(
            read(&path, Some(6))
                .unwrap_err()
                .message
                .contains("has 5 questions")
        );
        for (bad, wanted) in [
            ("{\"prompt\": \"p\"}", "not a question"),
            ("[]", "not a question"),
            (
                "{\"prompt\": \"p\", \"answer\": \"a\", \"max_new_tokens\": 100000}",
                "max_new_tokens is 100000",
            ),
            (
                "{\"prompt\": \"p\", \"answer\": \"a\", \"stop\": [\"\"]}",
                "a stop string is empty",
            ),
        ] {
            fs::write(&path, format!("{good}{bad}\n")).unwrap();
            let error = read(&path, None).unwrap_err();
            assert!(
                error.message.contains("line 2") && error.message.contains(wanted),
                "{error}"
            );
        }
    }
}
