//! Bounds on what a chat template may take: it comes with a model, from anybody.
//!
//! `minijinja` counts instructions and bytes (its fuel) and bounds nested tags and calls. What it does not bound is how deep an expression or a value
//! is, and it walks both by recursion. So code between two brackets is short, threads that run templates have a deep stack, and what outlives a turn
//! of a loop, which only a namespace does, is a flat copy. [`super::ChatTemplate`] calls it.

use std::panic::resume_unwind;
use std::thread;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

/// Longer sources are refused: the longest known templates have some 30 KB.
const MAX_SOURCE_BYTES: usize = 128 << 10;
/// Code in one tag, texts in quotes aside: the depth of its expression, and what folding constants takes, grow with it.
const MAX_TAG_BYTES: usize = 8 << 10;
/// Instructions, and bytes by 64, that one rendering may take: the longest known templates need a few hundred for each message. At most 256 MB.
pub(super) const FUEL: u64 = 4_000_000;
/// A longer conversation is refused before it is tokenised.
pub(super) const MAX_RENDERED_BYTES: usize = 16 << 20;
/// Touched only as deep as it is used. The deepest expressions, `elif`s and values that the bounds allow take a quarter.
const STACK_BYTES: usize = 256 << 20;
/// How deep a value in a namespace may be.
const MAX_DEPTH: usize = 16;
/// The function that makes flat copies.
pub(super) const KEPT: &str = "__kept";

/// Runs `work` where recursion has room.
pub(super) fn deep<T: Send>(work: impl FnOnce() -> T + Send) -> std::io::Result<T> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .name("template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work)?;
        Ok(thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// The source with every assignment to a namespace's attribute made through [`KEPT`].
///
/// # Errors
/// A source, or the code of a tag, that is too long.
pub(super) fn guarded(source: &str) -> Result<String, Error> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(refused(format!(
            "it has {} bytes, more than {MAX_SOURCE_BYTES}",
            source.len()
        )));
    }
    let mut guarded = String::with_capacity(source.len() + 64);
    let mut rest = source;
    while let Some(at) = ["{%", "{{", "{#"]
        .iter()
        .filter_map(|open| rest.find(open))
        .min()
    {
        let (before, tag) = rest.split_at(at);
        guarded.push_str(before);
        let length = match &tag[..2] {
            "{#" => tag.find("#}").map_or(tag.len(), |end| end + 2),
            "{{" => tag_length(tag, "}}")?,
            _ => tag_length(tag, "%}")?,
        };
        let (tag, after) = tag.split_at(length);
        rest = after;
        match assignment(tag) {
            Some((target, value, end)) => {
                guarded.extend([target, KEPT, "((", value, "))", end]);
            }
            None => guarded.push_str(tag),
        }
        if words(tag).next() == Some("raw") {
            let (raw, after) = rest.split_at(raw_length(rest));
            guarded.push_str(raw);
            rest = after;
        }
    }
    guarded.push_str(rest);
    Ok(guarded)
}

/// Bytes of the tag that a text begins with, brackets included.
fn tag_length(text: &str, close: &str) -> Result<usize, Error> {
    let (mut code, mut braces, mut at) = (0, 0_usize, 2);
    while let Some(character) = text[at..].chars().next() {
        if braces == 0 && text[at..].starts_with(close) {
            at += close.len();
            break;
        }
        at += match character {
            '"' | '\'' => quoted_length(&text[at..], character),
            _ => character.len_utf8(),
        };
        match character {
            '{' => braces += 1,
            '}' => braces = braces.saturating_sub(1),
            _ => {}
        }
        code += 1;
        if code > MAX_TAG_BYTES {
            return Err(refused(format!(
                "a tag has more than {MAX_TAG_BYTES} characters of code"
            )));
        }
    }
    Ok(at)
}

/// Bytes of the text in quotes that `text` begins with.
fn quoted_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Bytes up to the tag that ends a raw part.
fn raw_length(text: &str) -> usize {
    let mut tags = text.match_indices("{%");
    tags.find(|(at, _)| words(&text[*at..]).next() == Some("endraw"))
        .map_or(text.len(), |(at, _)| at)
}

/// The words that a block tag begins with.
fn words(tag: &str) -> impl Iterator<Item = &str> {
    let code = tag.strip_prefix("{%").unwrap_or_default();
    code.trim_start_matches(['-', '+']).split_whitespace()
}

/// An assignment to an attribute, in three parts: up to the value, the value, and from its end on.
fn assignment(tag: &str) -> Option<(&str, &str, &str)> {
    if words(tag).next()? != "set" {
        return None;
    }
    let at = tag.find('=')? + 1;
    let (target, value) = tag.split_at(at);
    // A quote before the sign: it belongs to a filter of a block, whose value is text.
    if !target.contains('.') || target.contains(['"', '\'', '|']) {
        return None;
    }
    let end = value.strip_suffix("%}")?.trim_end_matches(['-', '+']).len();
    let (value, end) = value.split_at(end);
    Some((target, value, end))
}

/// A copy of a value that shares no container with any other.
///
/// # Errors
/// A value that is too deep, or none that can be copied (a macro, a loop).
pub(super) fn kept(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    copy(state, value, 0)
}

fn copy(state: &State<'_, '_>, value: &Value, depth: usize) -> Result<Value, Error> {
    let below = |value: Value| {
        state.consume_fuel(1)?;
        copy(state, &value, depth + 1)
    };
    match value.kind() {
        ValueKind::Undefined
        | ValueKind::None
        | ValueKind::Bool
        | ValueKind::Number
        | ValueKind::String
        | ValueKind::Bytes => Ok(value.clone()),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if depth == MAX_DEPTH => {
            Err(refused(format!(
                "a value of a namespace is more than {MAX_DEPTH} lists or maps deep"
            )))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Result<Vec<Value>, Error> = value.try_iter()?.map(below).collect();
            Ok(Value::from(items?))
        }
        ValueKind::Map => {
            let pairs = value.try_iter()?;
            let pairs = pairs.map(|key| Ok((key.clone(), below(value.get_item(&key)?)?)));
            Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
        }
        other => Err(refused(format!(
            "a namespace keeps texts, numbers, lists and maps, and this is a {other}"
        ))),
    }
}

fn refused(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_to_attributes_go_through_the_copy_and_nothing_else_changes() {
        for (source, expected) in [
            (
                "{% set ns.x = [ns.x] %}",
                "{% set ns.x =__kept(( [ns.x] )) %}",
            ),
            (
                "{%- set ns.x=a if b else '%}'-%}",
                "{%- set ns.x=__kept((a if b else '%}'))-%}",
            ),
            (
                "{% set a, n.b = 1, 2 %}",
                "{% set a, n.b =__kept(( 1, 2 )) %}",
            ),
        ] {
            let expected = expected.replace(" )) %}", " ))%}");
            assert_eq!(guarded(source).unwrap(), expected);
        }
        for source in [
            "{% set x = a.b %}",
            "{% set ns.x %}a = b{% endset %}",
            "{% set ns.x | replace('a', '=') %}a{% endset %}",
            "{# {% set ns.x = 1 %} #}",
            "{% raw %}{% set ns.x = 1 %}{% endraw %}",
            "{{ '{% set ns.x = 1 %}' }}",
            "{{ {'a': {'b': \"}}\"}} }}{% if ns.x == 1 %}",
            "text, {% unfinished 'quote",
            "{",
        ] {
            assert_eq!(guarded(source).unwrap(), source);
        }
    }
}
