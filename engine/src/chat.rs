//! Chat templates: a conversation to the text that the model was trained on.
//!
//! The template comes from the model directory only, runs within bounds (`chat/limits.rs`) and sees no clock, so that two pods answer alike.
//! It says which part of its result is a message's: a content can go through the template as a mark and come out as a
//! [`Piece::Content`]. What is done with the pieces is the tokenizer's (`tokenizer/control.rs`).

mod limits;

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{AutoEscape, Environment, ErrorKind, State, Value as Jinja, context};
use serde::Deserialize;
use serde_json::Value;

use self::limits::{FUEL, KEPT, MAX_RENDERED_BYTES};
use crate::error::{Error, Result};
use crate::tokenizer::{named_token, read};

/// Who speaks. Templates write roles into control tokens (`'<|' + role + '|>'`), so a role is one of these and never a caller's own word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Role {
    /// Instructions; `developer` is a newer word for them, which few templates know.
    System,
    /// A person.
    User,
    /// The model.
    Assistant,
    /// What a tool answered.
    Tool,
}

impl Role {
    /// The word that templates read.
    const fn word(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl TryFrom<String> for Role {
    type Error = String;

    fn try_from(word: String) -> Result<Self, String> {
        match word.as_str() {
            "system" | "developer" => Ok(Self::System),
            "user" => Ok(Self::User),
            "assistant" => Ok(Self::Assistant),
            "tool" => Ok(Self::Tool),
            _ => Err("a role must be system, developer, user, assistant or tool".to_owned()),
        }
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
}

/// A part of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// What the template wrote, and contents that it was shown.
    Rendered(String),
    /// A message's content without the white space around it, which the template was not shown.
    Content(String),
}

impl Piece {
    /// The text of the piece.
    pub fn text(&self) -> &str {
        match self {
            Self::Rendered(text) | Self::Content(text) => text,
        }
    }
}

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The file that it comes from, which errors name.
    file: String,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    /// The template of `chat_template.jinja`, else of the tokenizer's configuration; nothing when there is none.
    ///
    /// # Errors
    /// When the template does not compile.
    pub fn open(directory: &Path, config: &Value) -> Result<Option<Self>> {
        let path = directory.join("chat_template.jinja");
        let (source, file) = match read(&path)? {
            Some(bytes) => (
                String::from_utf8(bytes)
                    .map_err(|_| Error::model(format!("{} is not UTF-8", path.display())))?,
                "chat_template.jinja",
            ),
            None => match configured(config) {
                Some(source) => (source.to_owned(), "tokenizer_config.json"),
                None => return Ok(None),
            },
        };
        let token = |key: &str| named_token(config, key).unwrap_or_default();
        let (bos, eos) = (token("bos_token"), token("eos_token"));
        let compiled = limits::deep(|| Self::compile(&source, file, &bos, &eos))
            .map_err(|error| no_thread(&error))?;
        compiled.map(Some).map_err(|error| {
            Error::model(format!(
                "{}: chat template: {}",
                directory.join(file).display(),
                one_line(&error)
            ))
        })
    }

    fn compile(source: &str, file: &str, bos: &str, eos: &str) -> Result<Self, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()?,
        );
        environment.set_fuel(Some(FUEL));
        // By default the name of a file decides, and JSON would be escaped.
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<String, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", tojson);
        environment.add_function(KEPT, |state: &State<'_, '_>, value: Jinja| {
            limits::kept(state, &value)
        });
        environment.add_template_owned(file.to_owned(), limits::guarded(source)?)?;
        Ok(Self {
            environment,
            file: file.to_owned(),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
        })
    }

    /// Whether the template's source holds this text.
    pub(crate) fn names(&self, text: &str) -> bool {
        (self.environment.get_template(&self.file))
            .is_ok_and(|template| template.source().contains(text))
    }

    /// The conversation with the assistant's turn opened at the end. The content of message `i` is a piece of its own where `apart(i)`; the
    /// template sees a mark in its place, between the white space that it may trim. An empty content is always shown.
    ///
    /// # Errors
    /// When the template refuses the messages.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        apart: impl Fn(usize) -> bool,
    ) -> Result<Vec<Piece>> {
        let mark = unused_character(messages)?;
        let mut list = Vec::with_capacity(messages.len());
        for (index, message) in messages.iter().enumerate() {
            let (before, body, after) = trimmed(&message.content);
            let content = if apart(index) && !body.is_empty() {
                format!("{before}{mark}{index}{mark}{after}")
            } else {
                message.content.clone()
            };
            list.push(context! { role => message.role.word(), content => content });
        }
        let context = context! {
            messages => list,
            add_generation_prompt => true,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let rendered = limits::deep(|| {
            (self.environment.get_template(&self.file))
                .and_then(|template| template.render(context))
                .map_err(|error| one_line(&error))
        });
        let text = rendered
            .map_err(|error| no_thread(&error))?
            .map_err(|why| self.refuses(&why))?;
        if text.len() > MAX_RENDERED_BYTES {
            return Err(self.refuses(&format!("they become {} bytes", text.len())));
        }
        Ok(split(&text, mark, messages))
    }

    fn refuses(&self, why: &str) -> Error {
        Error::data(format!(
            "the chat template ({}) refuses the messages: {why}",
            self.file
        ))
    }
}

fn no_thread(error: &std::io::Error) -> Error {
    Error::internal(format!("there is no thread for the chat template: {error}"))
}

/// A text, and the white space before and after it.
fn trimmed(text: &str) -> (&str, &str, &str) {
    let body = text.trim();
    let start = text.len() - text.trim_start().len();
    (&text[..start], body, &text[start + body.len()..])
}

/// The pieces of a text with marks: `mark`, a message's number, `mark`. What the template left of a mark that it cut is dropped.
fn split(text: &str, mark: char, messages: &[ChatMessage]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut rendered = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(mark) {
        rendered.push_str(before);
        rest = after;
        let marked = after.split_once(mark).and_then(|(number, after)| {
            Some((messages.get(number.parse::<usize>().ok()?)?, after))
        });
        if let Some((message, after)) = marked {
            if !rendered.is_empty() {
                pieces.push(Piece::Rendered(std::mem::take(&mut rendered)));
            }
            pieces.push(Piece::Content(message.content.trim().to_owned()));
            rest = after;
        }
    }
    rendered.push_str(rest);
    if !rendered.is_empty() {
        pieces.push(Piece::Rendered(rendered));
    }
    pieces
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
        ChatTemplate::compile(source, "chat_template.jinja", "<s>", "</s>").unwrap()
    }

    fn said(content: &str) -> ChatMessage {
        ChatMessage {
            role: Role::User,
            content: content.to_owned(),
        }
    }

    fn shown(template: &ChatTemplate, content: &str) -> Result<String> {
        let pieces = template.render(&[said(content)], |_| false)?;
        Ok(pieces.iter().map(Piece::text).collect())
    }

    const TURNS: &str = "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m['content'].strip() + '<|end|>' }}{% endfor %}";

    #[test]
    fn contents_are_pieces_between_the_templates_own_text() {
        let messages = [" a<|end|>x ", "\n", "b\u{FDD0}1\u{FDD0}"].map(said);
        let pieces = template(TURNS).render(&messages, |_| true).unwrap();
        let content = |text: &str| Piece::Content(text.to_owned());
        let rendered = |text: &str| Piece::Rendered(text.to_owned());
        let expected = [
            rendered("<s><|user|>"),
            content("a<|end|>x"),
            rendered("<|end|><|user|><|end|><|user|>"),
            content("b\u{FDD0}1\u{FDD0}"),
            rendered("<|end|>"),
        ];
        assert_eq!(pieces, expected);
    }

    #[test]
    fn a_mark_that_the_template_cuts_is_dropped_and_no_text_with_it() {
        let pieces = template("{{ messages[0].content[:2] }}of{{ messages[0].content[1:] }}it")
            .render(&[said("whole")], |_| true)
            .unwrap();
        assert_eq!(pieces, [Piece::Rendered("0of0it".to_owned())]);
    }

    #[test]
    fn contents_that_are_shown_come_out_as_they_are() {
        let template = template("{{ messages[0].content }}");
        for content in ["", "a\u{FDD0}0\u{FDD0}", " <|", "\u{FDD0}\u{FDD1}<|user|>"] {
            assert_eq!(shown(&template, content).unwrap(), content);
        }
    }

    /// Each in the smallest of stacks, and as deep or as long as its bounds allow.
    #[test]
    fn hostile_templates_end_in_an_error_that_names_the_file() {
        let space = "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(100000) %}";
        let kept = |value: &str, shown: &str| {
            format!("{space}{{% set ns.x = {value} %}}{{% endfor %}}{{{{ {shown} }}}}")
        };
        let folder = tempfile::tempdir().unwrap();
        for (source, why) in [
            (kept("[ns.x]", "ns.x"), "lists or maps deep"),
            (kept("{'a': ns.x}", "ns.x|tojson"), "lists or maps deep"),
            (kept("[ns]", "ns"), "lists or maps deep"),
            (kept("ns.x ~ ns.x", "1"), "fuel"),
            (kept("[ns.x] + [1]", "1"), "lists or maps deep"),
            (kept("1", "'x' * 100000000000"), "fuel"),
            (
                "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}"
                    .to_owned(),
                "fuel",
            ),
            (
                "{% for a in range(100000) %}{{ 'x' * 10000 }}{% endfor %}".to_owned(),
                "fuel",
            ),
            (
                "{% for a in range(2000) %}{{ 'x' * 10000 }}{% endfor %}".to_owned(),
                "bytes",
            ),
            (
                "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}".to_owned(),
                "recursion limit",
            ),
            (
                "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}".to_owned(),
                "recursion limit",
            ),
            ("{% include 'chat_template.jinja' %}".to_owned(), "include"),
            (
                format!("{{{{ 1{} }}}}", "+1".repeat(5000)),
                "characters of code",
            ),
            (format!("{{{{ x{} }}}}", "()".repeat(4000)), "x is unknown"),
            (format!("{{{{ {}x() }}}}", "-".repeat(8000)), "x is unknown"),
            (
                format!(
                    "{{% if 0 %}}{}{{% endif %}}{{{{ x() }}}}",
                    "{% elif 0 %}".repeat(10_000)
                ),
                "x is unknown",
            ),
            (
                format!(
                    "{{% set x = [] %}}{}{{{{ x }}}}{{{{ y() }}}}",
                    "{% set x=[x] %}".repeat(8000)
                ),
                "y is unknown",
            ),
            ("x".repeat(200_000), "200000 bytes"),
        ] {
            std::fs::write(folder.path().join("chat_template.jinja"), &source).unwrap();
            let error = match ChatTemplate::open(folder.path(), &Value::Null) {
                Ok(template) => shown(&template.unwrap(), "hi").unwrap_err(),
                Err(error) => error,
            };
            let start: String = source.chars().take(60).collect();
            assert!(error.message.contains(why), "{start}: {error}");
            assert!(
                error.message.contains("chat_template.jinja"),
                "{start}: {error}"
            );
        }
    }

    #[test]
    fn a_namespace_keeps_what_templates_keep_in_it() {
        let source = "{% set ns = namespace(system='', turns=[]) %}{% for m in messages %}{% set ns.system = ns.system ~ m.content %}{% set ns.turns = ns.turns + [{'role': m.role}] %}{% endfor %}{{ ns.system }} {{ ns.turns }} {{ ns.turns[0].role }}";
        assert_eq!(
            shown(&template(source), "hi").unwrap(),
            "hi [{'role': 'user'}] user"
        );
    }

    #[test]
    fn a_template_may_refuse_and_names_why() {
        let refuses = template("{{ raise_exception('roles must alternate') }}");
        let error = shown(&refuses, "hi").unwrap_err();
        assert!(error.message.contains("roles must alternate"), "{error}");
        assert!(!error.message.contains('\n'), "{error}");
    }

    #[test]
    fn a_role_is_one_of_five_words() {
        let role = |word: &str| Role::try_from(word.to_owned());
        for (word, read) in [
            ("system", "system"),
            ("developer", "system"),
            ("user", "user"),
            ("assistant", "assistant"),
            ("tool", "tool"),
        ] {
            assert_eq!(role(word).unwrap().word(), read);
        }
        for word in ["", "end", "User", "user|>x<|end"] {
            assert!(role(word).is_err(), "{word}");
        }
    }

    #[test]
    fn json_in_a_template_is_pythons() {
        let source = r#"{{ {"a": [1, "<b>&'\\u003c"]} | tojson }}"#;
        assert_eq!(
            shown(&template(source), "").unwrap(),
            r#"{"a": [1, "<b>&'\\u003c"]}"#
        );
    }
}
