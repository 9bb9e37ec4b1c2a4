//! A GGUF file's vocabulary as the `tokenizer.json` and `tokenizer_config.json` that it was made from.
//!
//! Two kinds can be rebuilt: byte-level BPE (`gpt2`), whose merges are in the file and whose splitting rule it names; and `sentencepiece` BPE
//! (`llama`), whose merges follow from the scores: the pair that makes the piece of the highest score is merged first.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::header::Header;

/// What a Hugging Face directory would hold.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Value,
    /// `tokenizer_config.json`, with the chat template.
    pub config: Value,
}

/// How each splitting rule cuts a text before merging: its name in the file, the digits that stay together, the normalisation of Unicode.
const RULES: [(&str, &str, Option<&str>); 3] = [
    ("llama-bpe", r"\p{N}{1,3}", None),
    ("llama3", r"\p{N}{1,3}", None),
    ("qwen2", r"\p{N}", Some("NFC")),
];

/// Kinds of tokens.
const NORMAL: f64 = 1.0;
const UNKNOWN: f64 = 2.0;
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;

/// Pieces of `sentencepiece` are below this many bytes; of longer ones, which only a damaged file has, no merges are sought.
const LONGEST_PIECE: usize = 256;

/// What would make an unreadable vocabulary load.
const FIX: &str = "put the model's tokenizer.json beside the file";

/// Rebuilds the tokenizer's files.
///
/// # Errors
/// A vocabulary that cannot be rebuilt, and what would make it load, without the file's name.
pub fn tokenizer_files(header: &Header, file: &[u8]) -> Result<TokenizerFiles, String> {
    let tokens: Vec<&str> = match header.array("tokenizer.ggml.tokens") {
        Some(array) if array.len() > 0 => array.texts(file).collect(),
        _ => return Err(format!("has no vocabulary: {FIX}")),
    };
    let kinds = header.array("tokenizer.ggml.token_type");
    let vocabulary = Vocabulary {
        header,
        file,
        tokens,
        kinds: kinds.map_or_else(Vec::new, |kinds| kinds.numbers(file).collect()),
    };
    let (parts, add_bos) = match header.text("tokenizer.ggml.model") {
        Some("gpt2") => (vocabulary.byte_level()?, false),
        Some("llama") => (vocabulary.sentencepiece()?, true),
        other => {
            return Err(format!(
                "has a vocabulary of {} model, which is not read: {FIX}",
                shown(other.unwrap_or("no"))
            ));
        }
    };
    let mut tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": vocabulary.added(),
    });
    let fields = tokenizer.as_object_mut().expect("it was made as an object");
    fields.extend(parts);
    Ok(TokenizerFiles {
        tokenizer,
        config: config(header, &vocabulary.tokens, add_bos),
    })
}

/// The tokens of a file, and where the rest about them is found.
struct Vocabulary<'a> {
    header: &'a Header,
    file: &'a [u8],
    tokens: Vec<&'a str>,
    kinds: Vec<f64>,
}

impl Vocabulary<'_> {
    fn is(&self, id: usize, kind: f64) -> bool {
        let own = self.kinds.get(id).copied().unwrap_or(NORMAL);
        own.total_cmp(&kind).is_eq()
    }

    /// What `tokenizer.json` has for byte-level BPE.
    fn byte_level(&self) -> Result<Map<String, Value>, String> {
        let rule = self.header.text("tokenizer.ggml.pre").unwrap_or("default");
        let Some((_, digits, normalizer)) = RULES.iter().find(|(name, ..)| *name == rule) else {
            return Err(format!(
                "has a vocabulary that splits text as {}, which is not known: {FIX}",
                shown(rule)
            ));
        };
        let merges = self.header.array("tokenizer.ggml.merges");
        let merges = merges.map(|merges| merges.texts(self.file));
        let merges: Vec<Value> = merges
            .into_iter()
            .flatten()
            .filter_map(|merge| merge.split_once(' '))
            .map(|(left, right)| json!([left, right]))
            .collect();
        let mut parts = byte_level(digits, *normalizer);
        let model = json!({
            "type": "BPE", "vocab": vocab(&self.tokens), "merges": merges, "ignore_merges": normalizer.is_none(),
            "byte_fallback": false, "fuse_unk": false,
        });
        parts.insert("model".into(), model);
        Ok(parts)
    }

    /// What `tokenizer.json` has for the BPE of `sentencepiece`.
    fn sentencepiece(&self) -> Result<Map<String, Value>, String> {
        let scores = self.header.array("tokenizer.ggml.scores");
        let scores: Vec<f64> =
            scores.map_or_else(Vec::new, |scores| scores.numbers(self.file).collect());
        if scores.len() != self.tokens.len() {
            return Err(format!("has a vocabulary without scores: {FIX}"));
        }
        let unknown = (0..self.tokens.len()).find(|id| self.is(*id, UNKNOWN));
        let prefix = self.header.bool("tokenizer.ggml.add_space_prefix") != Some(false);
        let mut parts = sentencepiece(prefix);
        let model = json!({
            "type": "BPE", "vocab": vocab(&self.tokens), "merges": self.merges(&scores),
            "unk_token": unknown.map(|id| self.tokens[id]), "byte_fallback": true, "fuse_unk": true,
        });
        parts.insert("model".into(), model);
        Ok(parts)
    }

    /// Tokens that are found in a text before it is split.
    fn added(&self) -> Vec<Value> {
        let ids = (0..self.tokens.len()).filter(|id| {
            [UNKNOWN, CONTROL, USER_DEFINED]
                .iter()
                .any(|kind| self.is(*id, *kind))
        });
        ids.map(|id| {
            json!({
                "id": id, "content": self.tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": !self.is(id, USER_DEFINED),
            })
        })
        .collect()
    }

    /// Every pair of pieces that together are a piece, those of the highest score first; equal ones by the ids of their parts.
    fn merges(&self, scores: &[f64]) -> Vec<Value> {
        let tokens = &self.tokens;
        let ids: HashMap<&str, usize> = tokens
            .iter()
            .enumerate()
            .map(|(id, token)| (*token, id))
            .collect();
        let mut pairs = Vec::new();
        let pieces = tokens.iter().enumerate();
        for (id, token) in
            pieces.filter(|(id, token)| self.is(*id, NORMAL) && token.len() <= LONGEST_PIECE)
        {
            for (at, _) in token.char_indices().skip(1) {
                let (left, right) = token.split_at(at);
                if let (Some(left_id), Some(right_id)) = (ids.get(left), ids.get(right)) {
                    pairs.push((scores[id], *left_id, *right_id));
                }
            }
        }
        pairs.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        pairs
            .into_iter()
            .map(|(_, left, right)| json!([tokens[left], tokens[right]]))
            .collect()
    }
}

/// A name of the file, fit for one line of an error.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(80).collect()
}

fn config(header: &Header, tokens: &[&str], add_bos: bool) -> Value {
    let token = |name: &str| {
        let id = header.unsigned(&format!("tokenizer.ggml.{name}_token_id"))?;
        tokens.get(usize::try_from(id).ok()?).copied()
    };
    json!({
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "add_bos_token": header.bool("tokenizer.ggml.add_bos_token").unwrap_or(add_bos),
        "chat_template": header.text("tokenizer.chat_template"),
    })
}

fn vocab(tokens: &[&str]) -> Map<String, Value> {
    let ids = tokens.iter().enumerate();
    ids.map(|(id, token)| ((*token).to_owned(), json!(id)))
        .collect()
}

/// GPT-2's alphabet of bytes behind a splitting rule.
fn byte_level(digits: &str, normalizer: Option<&str>) -> Map<String, Value> {
    let split = format!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let parts = json!({
        "normalizer": normalizer.map(|kind| json!({"type": kind})),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": false},
            level,
        ]},
        "post_processor": level,
        "decoder": level,
    });
    into_map(parts)
}

/// U+2581 for spaces, one in front of the text where `prefix` says so.
fn sentencepiece(prefix: bool) -> Map<String, Value> {
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let mut normalizers = vec![replace];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "\u{2581}"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    into_map(json!({
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }))
}

fn into_map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
