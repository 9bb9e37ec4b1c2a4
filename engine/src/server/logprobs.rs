//! Likelihoods as the two APIs write them: parallel lists for completions, objects for chats.

use serde_json::{Map, Value, json};

use crate::detokenize::Detokenizer;
use crate::sample::Likelihood;
use crate::tokenizer::Tokenizer;

/// Collects likelihoods until they are sent.
#[derive(Debug)]
pub(super) enum Logprobs {
    /// The client did not ask.
    Unwanted,
    /// Completions: lists, with the offset of each token in the answer's text.
    Lists(Box<Lists>),
    /// Chats: one object a token.
    Objects(Vec<Value>),
}

/// The lists of a completion.
#[derive(Debug, Default)]
pub(super) struct Lists {
    tokens: Vec<Value>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<Value>,
    /// Characters of the text so far.
    characters: usize,
    detokenizer: Detokenizer,
}

impl Logprobs {
    /// The prompt's tokens, of which the first has no likelihood.
    pub(super) fn prompt(
        &mut self,
        ids: &[u32],
        likelihoods: &[Likelihood],
        tokenizer: &Tokenizer,
    ) {
        let Self::Lists(lists) = self else { return };
        for (position, id) in ids.iter().enumerate() {
            let likelihood = position
                .checked_sub(1)
                .and_then(|before| likelihoods.get(before));
            // A beginning-of-sequence token in front has no text; other control tokens were written in the prompt.
            let hidden = position == 0 && tokenizer.bos() == Some(*id);
            lists.push(*id, likelihood, hidden, tokenizer);
        }
    }

    /// One token of the answer, where control tokens have no text.
    pub(super) fn token(
        &mut self,
        id: u32,
        likelihood: Option<&Likelihood>,
        tokenizer: &Tokenizer,
    ) {
        match self {
            Self::Unwanted => {}
            Self::Lists(lists) => lists.push(id, likelihood, tokenizer.is_special(id), tokenizer),
            Self::Objects(objects) => objects.extend(likelihood.map(|likelihood| {
                let mut object = entry(id, likelihood.logprob, tokenizer);
                let top = likelihood
                    .top
                    .iter()
                    .map(|(id, logprob)| entry(*id, *logprob, tokenizer));
                object["top_logprobs"] = top.collect();
                object
            })),
        }
    }

    /// What was collected since the last time, as JSON.
    pub(super) fn take(&mut self) -> Value {
        match self {
            Self::Unwanted => Value::Null,
            Self::Objects(objects) => json!({"content": std::mem::take(objects)}),
            Self::Lists(lists) => json!({
                "tokens": std::mem::take(&mut lists.tokens),
                "token_logprobs": std::mem::take(&mut lists.token_logprobs),
                "top_logprobs": std::mem::take(&mut lists.top_logprobs),
                "text_offset": std::mem::take(&mut lists.text_offset),
            }),
        }
    }
}

impl Lists {
    fn push(
        &mut self,
        id: u32,
        likelihood: Option<&Likelihood>,
        hidden: bool,
        tokenizer: &Tokenizer,
    ) {
        self.tokens.push(token_name(id, tokenizer).into());
        self.text_offset.push(self.characters.into());
        if !hidden {
            self.characters += self
                .detokenizer
                .push(tokenizer.token_bytes(id))
                .chars()
                .count();
        }
        self.token_logprobs
            .push(likelihood.map(|likelihood| likelihood.logprob).into());
        self.top_logprobs
            .push(likelihood.map_or(Value::Null, |likelihood| {
                let mut top = Map::new();
                for (id, logprob) in &likelihood.top {
                    // Two tokens of one name: the more likely one came first.
                    top.entry(token_name(*id, tokenizer))
                        .or_insert_with(|| (*logprob).into());
                }
                top.into()
            }));
    }
}

/// The token's text, or its bytes where they are no text by themselves.
fn token_name(id: u32, tokenizer: &Tokenizer) -> String {
    let bytes = tokenizer.token_bytes(id);
    if let Ok(text) = str::from_utf8(bytes) {
        return text.to_owned();
    }
    let hex = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
    std::iter::once("bytes:".to_owned()).chain(hex).collect()
}

fn entry(id: u32, logprob: f32, tokenizer: &Tokenizer) -> Value {
    let bytes = tokenizer.token_bytes(id);
    json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes})
}
