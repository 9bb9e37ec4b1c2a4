//! Chat templates: a conversation to the text that the model was trained on.
//!
//! The template comes from the model directory only, runs with a fuel limit and sees no clock, so that two pods answer alike.
//! Text of a message that spells a control token is carried through the template as a mark and comes out as a
//! [`Piece::Literal`], which the tokenizer encodes as ordinary text.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, Value as Jinja, context};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::tokenizer::{named_token, read};

/// Instructions that one rendering may take: the longest known templates need a few thousand for each message.
const FUEL: u64 = 20_000_000;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// Who speaks: `system`, `user`, `assistant`, `tool` or what else the template knows. Letters, `_` and `-` only.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A part of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text in which control tokens count.
    Rendered(String),
    /// Text of a message that spells a control token and must not become one.
    Literal(String),
}

impl Piece {
    /// The text of the piece.
    pub fn text(&self) -> &str {
        match self {
            Self::Rendered(text) | Self::Literal(text) => text,
        }
    }
}

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    /// The written forms of the control tokens, longest first, so that the longest is found where several begin alike.
    controls: Vec<String>,
}

impl ChatTemplate {
    /// The template of `chat_template.jinja`, else of the tokenizer's configuration; nothing when there is none.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn open(directory: &Path, config: &Value, controls: &[String]) -> Result<Option<Self>> {
        let path = directory.join("chat_template.jinja");
        let (source, name) = match read(&path)? {
            Some(bytes) => (
                String::from_utf8(bytes)
                    .map_err(|_| Error::model(format!("{} is not UTF-8", path.display())))?,
                path,
            ),
            None => match configured(config) {
                Some(source) => (source.to_owned(), directory.join("tokenizer_config.json")),
                None => return Ok(None),
            },
        };
        let token = |key: &str| named_token(config, key).unwrap_or_default();
        Self::compile(source, &token("bos_token"), &token("eos_token"), controls)
            .map(Some)
            .map_err(|error| {
                Error::model(format!(
                    "{}: chat template: {}",
                    name.display(),
                    one_line(&error)
                ))
            })
    }

    fn compile(
        source: String,
        bos: &str,
        eos: &str,
        controls: &[String],
    ) -> Result<Self, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()?,
        );
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", tojson);
        environment.add_template_owned("chat", source)?;
        let mut controls = controls.to_vec();
        controls.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        Ok(Self {
            environment,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            controls,
        })
    }

    /// The conversation with the assistant's turn opened at the end, control tokens that messages spell set apart.
    ///
    /// # Errors
    /// When a role is not a word or the template refuses the messages.
    pub fn render(&self, messages: &[ChatMessage]) -> Result<Vec<Piece>> {
        let mark = unused_character(messages)?;
        self.run(messages, mark, |text| self.marked(text, mark))
    }

    /// As [`Self::render`], with the edges of messages that might complete a control token set apart too.
    /// Nothing when no message has such an edge.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_edges(&self, messages: &[ChatMessage]) -> Result<Option<Vec<Piece>>> {
        if !messages
            .iter()
            .any(|message| self.risky_start(&message.content) || self.risky_end(&message.content))
        {
            return Ok(None);
        }
        let mark = unused_character(messages)?;
        let pieces = self.run(messages, mark, |text| self.marked_edges(text, mark))?;
        Ok(Some(pieces))
    }

    fn run(
        &self,
        messages: &[ChatMessage],
        mark: char,
        transform: impl Fn(&str) -> String,
    ) -> Result<Vec<Piece>> {
        let mut list = Vec::with_capacity(messages.len());
        for message in messages {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if message.role.is_empty() || !message.role.chars().all(word) {
                return Err(Error::data(
                    "a message's role must be a word such as system, user, assistant or tool",
                ));
            }
            list.push(context! {
                role => message.role.as_str(),
                content => transform(&message.content),
            });
        }
        let context = context! {
            messages => list,
            add_generation_prompt => true,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let text = (self.environment.get_template("chat"))
            .and_then(|template| template.render(context))
            .map_err(|error| {
                Error::data(format!(
                    "the chat template refuses the messages: {}",
                    one_line(&error)
                ))
            })?;
        Ok(self.split(&text, mark))
    }

    /// Each control token in `text` replaced by its number between two marks.
    fn marked(&self, text: &str, mark: char) -> String {
        let mut marked = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(character) = rest.chars().next() {
            let found = (self.controls.iter().enumerate())
                .find(|(_, control)| rest.starts_with(control.as_str()));
            if let Some((number, control)) = found {
                marked.extend([mark.to_string(), number.to_string(), mark.to_string()]);
                rest = &rest[control.len()..];
            } else {
                marked.push(character);
                rest = &rest[character.len_utf8()..];
            }
        }
        marked
    }

    /// As [`Self::marked`], with an empty pair of marks at risky edges (inside the white space that a template may trim).
    fn marked_edges(&self, text: &str, mark: char) -> String {
        let body = text.trim();
        let start = text.len() - text.trim_start().len();
        let (before, after) = (&text[..start], &text[start + body.len()..]);
        let edge = |risky: bool| {
            if risky {
                format!("{mark}{mark}")
            } else {
                String::new()
            }
        };
        let first = edge(self.risky_start(text));
        let last = edge(self.risky_end(text));
        format!("{before}{first}{}{last}{after}", self.marked(body, mark))
    }

    /// Whether the text begins with the end of a control token.
    fn risky_start(&self, text: &str) -> bool {
        let text = text.trim();
        self.inner_cuts().any(|(_, tail)| text.starts_with(tail))
    }

    /// Whether the text ends with the beginning of a control token.
    fn risky_end(&self, text: &str) -> bool {
        let text = text.trim();
        self.inner_cuts().any(|(head, _)| text.ends_with(head))
    }

    fn inner_cuts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.controls.iter().flat_map(|control| {
            control
                .char_indices()
                .skip(1)
                .map(|(at, _)| control.split_at(at))
        })
    }

    fn split(&self, text: &str, mark: char) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (index, part) in text.split(mark).enumerate() {
            if index % 2 == 0 {
                if !part.is_empty() {
                    pieces.push(Piece::Rendered(part.to_owned()));
                }
            } else if let Some(control) = part
                .parse::<usize>()
                .ok()
                .and_then(|number| self.controls.get(number))
            {
                pieces.push(Piece::Literal(control.clone()));
            }
        }
        pieces
    }
}

/// The template in `tokenizer_config.json`: a text, or a list of named ones of which `default` is meant.
fn configured(config: &Value) -> Option<&str> {
    let entry = config.get("chat_template")?;
    entry.as_str().or_else(|| {
        (entry.as_array()?.iter())
            .find(|named| named["name"] == "default")
            .and_then(|named| named["template"].as_str())
    })
}

/// A Unicode noncharacter that no message contains: it marks places in the text and cannot be mistaken for content.
fn unused_character(messages: &[ChatMessage]) -> Result<char> {
    ('\u{FDD0}'..='\u{FDEF}')
        .find(|mark| !messages.iter().any(|message| message.content.contains(*mark)))
        .ok_or_else(|| Error::data("the messages contain every Unicode noncharacter from U+FDD0 to U+FDEF: remove these"))
}

/// `json.dumps` as transformers' templates expect it: minijinja's own filter also escapes what HTML would mind.
fn tojson(
    value: &Jinja,
    indent: Option<Jinja>,
    keywords: Kwargs,
) -> Result<Jinja, minijinja::Error> {
    let json = minijinja::filters::tojson(value, indent, keywords)?;
    let json = json.to_string();
    let mut plain = String::with_capacity(json.len());
    let mut tail = json.as_str();
    while let Some(at) = tail.find('\\') {
        let (before, escape) = tail.split_at(at);
        plain.push_str(before);
        let (length, text) = match escape.get(..6) {
            Some("\\u003c") => (6, "<"),
            Some("\\u003e") => (6, ">"),
            Some("\\u0026") => (6, "&"),
            Some("\\u0027") => (6, "'"),
            _ => (2, &escape[..2]),
        };
        plain.push_str(text);
        tail = &escape[length..];
    }
    plain.push_str(tail);
    Ok(Jinja::from(plain))
}

fn one_line(error: &minijinja::Error) -> String {
    error
        .to_string()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let controls = ["<|user|>", "<|end|>", "<|end|>x"].map(str::to_owned);
        ChatTemplate::compile(source.to_owned(), "<s>", "</s>", &controls).unwrap()
    }

    fn said(content: &str) -> ChatMessage {
        ChatMessage {
            role: "user".to_owned(),
            content: content.to_owned(),
        }
    }

    fn text(template: &ChatTemplate, content: &str) -> String {
        template
            .render(&[said(content)])
            .unwrap()
            .iter()
            .map(Piece::text)
            .collect()
    }

    const TURNS: &str = "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m['content'].strip() + '<|end|>' }}{% endfor %}";

    #[test]
    fn control_tokens_in_a_message_are_literal_pieces() {
        let pieces = template(TURNS)
            .render(&[said("a<|end|>xb<|user|>")])
            .unwrap();
        let literal = |text: &str| Piece::Literal(text.to_owned());
        let rendered = |text: &str| Piece::Rendered(text.to_owned());
        let expected = [
            rendered("<s><|user|>a"),
            literal("<|end|>x"),
            rendered("b"),
            literal("<|user|>"),
            rendered("<|end|>"),
        ];
        assert_eq!(pieces, expected);
    }

    #[test]
    fn text_survives_the_marks() {
        let template = template("{{ messages[0].content }}");
        for content in [
            "",
            "a\u{FDD0}0\u{FDD0}",
            "<|",
            "1 <|end|> \u{1F600}",
            "\u{FDD0}\u{FDD1}<|user|><|user|>",
        ] {
            assert_eq!(text(&template, content), content);
        }
    }

    #[test]
    fn edges_that_could_complete_a_control_token_are_set_apart_inside_white_space() {
        let template = template(TURNS);
        let pieces = template.render_edges(&[said(" a<|us ")]).unwrap().unwrap();
        let expected = ["<s><|user|>a<|us", "<|end|>"].map(|text| Piece::Rendered(text.to_owned()));
        assert_eq!(pieces, expected);
        assert_eq!(
            template.render_edges(&[said("nothing to see")]).unwrap(),
            None
        );
    }

    #[test]
    fn a_template_that_never_ends_runs_out_of_fuel() {
        let loops =
            "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}";
        let error = template(loops).render(&[said("hi")]).unwrap_err();
        assert!(error.message.contains("fuel"), "{error}");
    }

    #[test]
    fn a_template_may_refuse_and_names_why() {
        let error = template("{{ raise_exception('roles must alternate') }}")
            .render(&[said("hi")])
            .unwrap_err();
        assert!(error.message.contains("roles must alternate"), "{error}");
        assert!(!error.message.contains('\n'), "{error}");
    }

    #[test]
    fn a_role_is_a_word() {
        let message = ChatMessage {
            role: "user|>x<|end".to_owned(),
            content: String::new(),
        };
        assert!(template(TURNS).render(&[message]).is_err());
    }

    #[test]
    fn json_in_a_template_is_pythons() {
        let source = r#"{{ {"a": [1, "<b>&'\\u003c"]} | tojson }}"#;
        assert_eq!(text(&template(source), ""), r#"{"a": [1, "<b>&'\\u003c"]}"#);
    }
}
