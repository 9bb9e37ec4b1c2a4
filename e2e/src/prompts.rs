//! Requests whose right answer is known: the agent prompts that the demo model answers exactly.

use anyhow::Context as _;
use serde::Deserialize;
use serde_json::Value;

/// One chat request and its answer.
#[derive(Debug, Clone, Deserialize)]
pub struct Prompt {
    /// The row's name in the data.
    pub id: String,
    /// How long the prompt is, in tokens of the demo model.
    pub n_prompt_tokens: usize,
    /// Enough for the answer.
    pub max_tokens: usize,
    /// As the chat API takes them.
    pub messages: Vec<Value>,
    /// What the model says, without white space around it.
    pub answer: String,
}

/// The prompts that the repository ships, in the program so that a pod has them too.
pub fn shipped() -> anyhow::Result<Vec<Prompt>> {
    let rows = include_str!("../data/agentic-prompts.jsonl").lines();
    rows.map(|line| serde_json::from_str(line).context("a row of agentic-prompts.jsonl"))
        .collect()
}

/// Those that are cheap enough for a load generator.
pub fn short() -> anyhow::Result<Vec<Prompt>> {
    Ok(shipped()?
        .into_iter()
        .filter(|prompt| prompt.n_prompt_tokens <= 350)
        .collect())
}

/// Those that are long enough for the quantised prefill of the scenarios' service.
pub fn long() -> anyhow::Result<Vec<Prompt>> {
    Ok(shipped()?
        .into_iter()
        .filter(|prompt| prompt.n_prompt_tokens >= 512)
        .take(6)
        .collect())
}

/// An answer as the references count it: the first line, without white space around it.
pub fn first_line(answer: &str) -> &str {
    answer
        .trim_start_matches(' ')
        .lines()
        .next()
        .unwrap_or("")
        .trim()
}
