//! What clients may ask for: the fields of the two completion endpoints, checked before anything is computed or allocated.

use std::ops::RangeInclusive;

use serde_json::{Value, json};

use crate::chat::{ChatMessage, Role};
use crate::sample::Sampling;

use super::error::ApiError;
use super::fields::Fields;

/// Answers to one prompt.
const MAX_N: usize = 8;
/// Messages of one conversation.
const MAX_MESSAGES: usize = 4096;
/// Stop strings, and bytes of each.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// One prompt as the client wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Prompt {
    /// To be tokenised, with the beginning-of-sequence token first.
    Text(String),
    /// As they are.
    Ids(Vec<u32>),
    /// To go through the chat template.
    Chat(Vec<ChatMessage>),
}

/// A checked request.
#[derive(Debug)]
pub(super) struct Request {
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// Answers to each prompt.
    pub n: usize,
    /// Absent: 16 for a completion, the rest of the context for a chat.
    pub max_new_tokens: Option<usize>,
    /// The field that says so.
    pub max_name: &'static str,
    /// Not more than `max_new_tokens`.
    pub min_new_tokens: usize,
    /// End tokens are tokens like others.
    pub ignore_eos: bool,
    /// How tokens are drawn; the seed is meaningful only when `seeded`.
    pub sampling: Sampling,
    /// Whether the client chose the seed.
    pub seeded: bool,
    /// Stop strings.
    pub stops: Vec<String>,
    /// Likelihoods with so many alternatives.
    pub logprobs: Option<usize>,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// How the answer is sent.
    pub stream: Option<StreamOptions>,
}

/// How a stream looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamOptions {
    /// A last chunk without choices has the usage.
    pub include_usage: bool,
    /// Every chunk has the usage so far.
    pub continuous_usage: bool,
}

/// What the model and this process allow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Prompt and answer together.
    pub max_sequence_length: usize,
    /// Ids are below this.
    pub vocab_size: usize,
    /// Sequences of one request.
    pub max_sequences: usize,
}

impl Request {
    /// A request to `/v1/completions`.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub(super) fn completion(mut fields: Fields, bounds: Bounds) -> Result<Self, ApiError> {
        let prompt = fields
            .take("prompt")
            .ok_or_else(|| ApiError::field("prompt", "`prompt` is missing"))?;
        let prompts = prompts(prompt, bounds)?;
        let echo = fields.boolean("echo")?;
        let logprobs = fields.integer("logprobs", 0..=5)?;
        let max = fields.integer(
            "max_tokens",
            usize::from(!echo)..=bounds.max_sequence_length,
        )?;
        fields.neutral(&[
            ("best_of", &[json!(1)]),
            ("suffix", &[json!("")]),
            ("add_special_tokens", &[json!(true)]),
        ])?;
        Self::common(
            fields,
            prompts,
            bounds,
            Specific {
                echo,
                logprobs,
                max,
                max_name: "max_tokens",
            },
        )
    }

    /// A request to `/v1/chat/completions`.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub(super) fn chat(mut fields: Fields, bounds: Bounds) -> Result<Self, ApiError> {
        let messages = fields
            .take("messages")
            .ok_or_else(|| ApiError::field("messages", "`messages` is missing"))?;
        let prompts = vec![Prompt::Chat(parse_messages(messages)?)];
        let wanted = fields.boolean("logprobs")?;
        let top = fields.integer("top_logprobs", 0..=20)?;
        if top.is_some() && !wanted {
            return Err(ApiError::field(
                "top_logprobs",
                "`top_logprobs` needs `logprobs` to be true",
            ));
        }
        let logprobs = wanted.then_some(top.unwrap_or(0));
        let range = 1..=bounds.max_sequence_length;
        let older = fields.integer("max_tokens", range.clone())?;
        let newer = fields.integer("max_completion_tokens", range)?;
        let max_name = if newer.is_some() {
            "max_completion_tokens"
        } else {
            "max_tokens"
        };
        let max = newer.or(older);
        fields.neutral(&[
            ("tools", &[json!([])]),
            ("tool_choice", &[json!("none"), json!("auto")]),
            ("functions", &[json!([])]),
            ("function_call", &[json!("none"), json!("auto")]),
            ("modalities", &[json!(["text"])]),
            ("add_generation_prompt", &[json!(true)]),
            ("continue_final_message", &[json!(false)]),
            ("store", &[json!(false)]),
        ])?;
        // It speaks of tool calls, and there are none.
        fields.ignore(&["parallel_tool_calls"]);
        Self::common(
            fields,
            prompts,
            bounds,
            Specific {
                echo: false,
                logprobs,
                max,
                max_name,
            },
        )
    }

    fn common(
        mut fields: Fields,
        prompts: Vec<Prompt>,
        bounds: Bounds,
        Specific {
            echo,
            logprobs,
            max,
            max_name,
        }: Specific,
    ) -> Result<Self, ApiError> {
        let n = fields.integer("n", 1..=MAX_N)?.unwrap_or(1);
        if prompts.len() * n > bounds.max_sequences {
            let (asked, most) = (prompts.len() * n, bounds.max_sequences);
            return Err(ApiError::field(
                "prompt",
                format!("{asked} answers are asked for: at most {most} at once"),
            ));
        }
        let min_range = 0..=max.unwrap_or(bounds.max_sequence_length);
        let min_new_tokens = fields.integer("min_tokens", min_range)?.unwrap_or(0);
        let seed = seed(&mut fields)?;
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0..=2.0, 1.0)?,
            top_k: top_k(&mut fields)?,
            top_p: positive(&mut fields, "top_p", 1.0)?,
            min_p: fields.number("min_p", 0.0..=1.0, 0.0)?,
            seed: seed.unwrap_or(0),
        };
        let stops = stops(fields.take("stop"))?;
        let ignore_eos = fields.boolean("ignore_eos")?;
        let stream = stream_options(&mut fields)?;
        fields.neutral(&[
            ("logit_bias", &[json!({})]),
            ("presence_penalty", &[json!(0)]),
            ("frequency_penalty", &[json!(0)]),
            ("repetition_penalty", &[json!(1)]),
            ("length_penalty", &[json!(1)]),
            ("response_format", &[json!({"type": "text"})]),
            ("stop_token_ids", &[json!([])]),
            ("skip_special_tokens", &[json!(true)]),
            ("spaces_between_special_tokens", &[json!(true)]),
            ("include_stop_str_in_output", &[json!(false)]),
            ("use_beam_search", &[json!(false)]),
            ("service_tier", &[json!("auto"), json!("default")]),
        ])?;
        fields.ignore(&[
            "model",
            "user",
            "metadata",
            "safety_identifier",
            "prompt_cache_key",
        ]);
        fields.finish("")?;
        Ok(Self {
            prompts,
            n,
            max_new_tokens: max,
            max_name,
            min_new_tokens,
            ignore_eos,
            sampling,
            seeded: seed.is_some(),
            stops,
            logprobs,
            echo,
            stream,
        })
    }
}

/// What the two endpoints write differently.
struct Specific {
    echo: bool,
    logprobs: Option<usize>,
    max: Option<usize>,
    max_name: &'static str,
}

fn prompts(value: Value, bounds: Bounds) -> Result<Vec<Prompt>, ApiError> {
    let wrong = || {
        ApiError::field(
            "prompt",
            "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists, none of them empty",
        )
    };
    let list = match value {
        Value::String(text) if !text.is_empty() => return Ok(vec![Prompt::Text(text)]),
        Value::Array(list) if !list.is_empty() => list,
        _ => return Err(wrong()),
    };
    if list[0].is_number() {
        return Ok(vec![Prompt::Ids(token_ids(&list, "prompt", bounds)?)]);
    }
    if list.len() > bounds.max_sequences {
        let most = bounds.max_sequences;
        return Err(ApiError::field(
            "prompt",
            format!(
                "`prompt` has {} entries: at most {most} at once",
                list.len()
            ),
        ));
    }
    (list.into_iter())
        .map(|entry| match entry {
            Value::String(text) if !text.is_empty() => Ok(Prompt::Text(text)),
            Value::Array(ids) if !ids.is_empty() => {
                Ok(Prompt::Ids(token_ids(&ids, "prompt", bounds)?))
            }
            _ => Err(wrong()),
        })
        .collect()
}

/// Token ids, each in the vocabulary and not more than the context holds.
pub(super) fn token_ids(list: &[Value], name: &str, bounds: Bounds) -> Result<Vec<u32>, ApiError> {
    let (most, vocabulary) = (bounds.max_sequence_length, bounds.vocab_size);
    if list.len() > most {
        return Err(ApiError::field(
            name,
            format!(
                "`{name}` has {} tokens: the context holds {most}",
                list.len()
            ),
        ));
    }
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.filter(|id| (*id as usize) < vocabulary).ok_or_else(|| {
            ApiError::field(
                name,
                format!(
                    "`{name}` holds what is no token id: ids are whole numbers from 0 to {}",
                    vocabulary - 1
                ),
            )
        })
    };
    list.iter().map(id).collect()
}

/// The messages of a conversation.
pub(super) fn parse_messages(value: Value) -> Result<Vec<ChatMessage>, ApiError> {
    match value {
        Value::Array(list) if (1..=MAX_MESSAGES).contains(&list.len()) => list
            .into_iter()
            .enumerate()
            .map(|(index, value)| message(index, value))
            .collect(),
        _ => Err(ApiError::field(
            "messages",
            format!("`messages` must be a list of 1 to {MAX_MESSAGES} messages"),
        )),
    }
}

fn message(index: usize, value: Value) -> Result<ChatMessage, ApiError> {
    let place = format!("messages[{index}]");
    let mut fields = Fields::of(value, &place)?;
    let role = fields.string("role")?.unwrap_or_default();
    let role = Role::try_from(role).map_err(|why| {
        let name = format!("{place}.role");
        ApiError::field(name.clone(), format!("`{name}`: {why}"))
    })?;
    let content = content(&place, fields.take("content"))?;
    // It links a tool's answer to a call; the templates of this model family do not show it.
    fields.ignore(&["tool_call_id"]);
    fields.finish(&place)?;
    Ok(ChatMessage { role, content })
}

/// A text, or text parts that are joined by line breaks.
fn content(place: &str, value: Option<Value>) -> Result<String, ApiError> {
    let name = format!("{place}.content");
    let wrong = || {
        ApiError::field(
            name.clone(),
            format!("`{name}` must be a string or a list of text parts"),
        )
    };
    match value {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let texts: Option<Vec<&str>> = (parts.iter())
                .map(|part| part["text"].as_str().filter(|_| part["type"] == "text"))
                .collect();
            Ok(texts.ok_or_else(wrong)?.join("\n"))
        }
        _ => Err(wrong()),
    }
}

fn stops(value: Option<Value>) -> Result<Vec<String>, ApiError> {
    let list = match value {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(text) => vec![text],
    };
    let text = |value: Value| match value {
        Value::String(text) if (1..=MAX_STOP_BYTES).contains(&text.len()) => Some(text),
        _ => None,
    };
    let count = list.len();
    let texts: Option<Vec<String>> = list.into_iter().map(text).collect();
    texts.filter(|_| count <= MAX_STOPS).ok_or_else(|| {
        ApiError::field("stop", format!("`stop` must be a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_BYTES} bytes"))
    })
}

fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else {
        return Ok(None);
    };
    (value.as_u64())
        .or_else(|| value.as_i64().map(i64::cast_unsigned))
        .map(Some)
        .ok_or_else(|| ApiError::field("seed", "`seed` must be a whole number of 64 bits"))
}

/// -1 and 0 both mean all.
fn top_k(fields: &mut Fields) -> Result<usize, ApiError> {
    match fields.take("top_k") {
        None => Ok(0),
        Some(value) if value.as_i64() == Some(-1) => Ok(0),
        Some(value) => (value.as_u64())
            .and_then(|k| usize::try_from(k).ok())
            .ok_or_else(|| {
                ApiError::field("top_k", "`top_k` must be a whole number, -1 or 0 for all")
            }),
    }
}

fn positive(fields: &mut Fields, name: &str, most: f32) -> Result<f32, ApiError> {
    let range: RangeInclusive<f32> = 0.0..=most;
    let number = fields.number(name, range, most)?;
    if number > 0.0 {
        return Ok(number);
    }
    Err(ApiError::field(
        name,
        format!("`{name}` must be above 0 and at most {most}"),
    ))
}

fn stream_options(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let stream = fields.boolean("stream")?;
    let Some(options) = fields.take("stream_options") else {
        let plain = StreamOptions {
            include_usage: false,
            continuous_usage: false,
        };
        return Ok(stream.then_some(plain));
    };
    if !stream {
        return Err(ApiError::field(
            "stream_options",
            "`stream_options` needs `stream` to be true",
        ));
    }
    let mut options = Fields::of(options, "stream_options")?;
    let include_usage = options.boolean("include_usage")?;
    let continuous_usage = options.boolean("continuous_usage_stats")?;
    // Padding against side channels: there is none to switch off.
    options.ignore(&["include_obfuscation"]);
    options.finish("stream_options")?;
    Ok(Some(StreamOptions {
        include_usage,
        continuous_usage,
    }))
}
