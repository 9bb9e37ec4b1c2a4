//! Where control tokens may come from: from a chat template, never from what a message says.
//!
//! [`super::Tokenizer::encode_chat`] calls it. A conversation is tokenised as one text, as everybody else does, and that is taken only if every control
//! token in it lies in the template's own text. Otherwise each content is tokenised apart, by a tokenizer that finds no control tokens.
//! It decides by the ids and places that the library reports, never by searching a message for a spelling: normalisers make one out of many.

use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::Value;
use tokenizers::Tokenizer as Inner;

use super::{encode, guarded};
use crate::chat::{ChatMessage, ChatTemplate, Piece, Role};
use crate::error::{Error, Result};

/// The control tokens of a tokenizer, and the tokenizer without them.
pub(super) struct Controls {
    /// Added tokens that a message must not become.
    ids: BTreeSet<u32>,
    /// What a vocabulary gives for what it does not know. It may be a control token, and is in any text.
    unknown: Option<u32>,
    /// The same tokenizer, to which control tokens are text.
    plain: Inner,
}

impl Controls {
    /// All added tokens are control tokens but for words and white space that are not special and that the template does not name: they extend the
    /// vocabulary for ordinary text (Gemma's line breaks, a domain's words), and reading text without them would not be what the model learnt.
    pub(super) fn new(
        inner: &Inner,
        json: &Value,
        template: Option<&ChatTemplate>,
    ) -> Result<Self, String> {
        let (mut ids, mut tokens) = (BTreeSet::new(), Vec::new());
        for (id, token) in inner.get_added_tokens_decoder() {
            let text = token.content.trim();
            let named = !text.is_empty() && template.is_some_and(|template| template.names(text));
            if !token.special && !named && token.content.chars().all(is_text) {
                continue;
            }
            ids.insert(id);
            tokens.push(token.special(true));
        }
        let mut plain = inner.clone();
        // Every token is there already: only its flag changes, and the library passes over special tokens when told so.
        guarded(|| plain.add_tokens(tokens))?;
        plain.set_encode_special_tokens(true);
        Ok(Self {
            ids,
            unknown: unknown_token(inner, json),
            plain,
        })
    }

    /// The ids of a conversation.
    pub(super) fn encode_chat(
        &self,
        inner: &Inner,
        template: &ChatTemplate,
        messages: &[ChatMessage],
    ) -> Result<Vec<u32>> {
        let apart = template.render(messages, |_| true)?;
        let whole = template.render(messages, |_| false)?;
        let whole: String = whole.iter().map(Piece::text).collect();
        let written = self.written(inner, &apart)?;
        let (bodies, text) = bodies(&apart);
        if text == whole {
            if let Some(ids) = self.joined(inner, &whole, &bodies, &written)? {
                return Ok(ids);
            }
        } else {
            // The template looks at contents. It may see those of the model, out of which it cuts the reasoning, and others that hold no control token.
            let mut hidden = vec![false; messages.len()];
            for (hidden, message) in hidden.iter_mut().zip(messages) {
                *hidden = message.role != Role::Assistant && self.found(inner, &message.content)?;
            }
            let ids = self.pieces(inner, &template.render(messages, |index| hidden[index])?)?;
            if self.only(&ids, &written) {
                return Ok(ids);
            }
        }
        self.pieces(inner, &apart)
    }

    /// The control tokens that the template writes, contents aside.
    fn written(&self, inner: &Inner, pieces: &[Piece]) -> Result<Vec<u32>> {
        let mut written = Vec::new();
        for piece in pieces {
            if let Piece::Rendered(text) = piece {
                let ids = encode(inner, text, false)?;
                written.extend(ids.into_iter().filter(|id| self.ids.contains(id)));
            }
        }
        Ok(written)
    }

    /// The ids of the whole text, unless a control token in it touches a content or is not one of the template's.
    fn joined(
        &self,
        inner: &Inner,
        text: &str,
        bodies: &[Range<usize>],
        written: &[u32],
    ) -> Result<Option<Vec<u32>>> {
        let encoding = guarded(|| inner.encode(text, false)).map_err(|why| unusable(&why))?;
        let ids = encoding.get_ids();
        let mut places = ids.iter().zip(encoding.get_offsets());
        let clear = places.all(|(id, &(start, end))| {
            !self.ids.contains(id) || core(text, start..end).is_some_and(|at| clear(&at, bodies))
        });
        Ok((clear && self.only(ids, written)).then(|| ids.to_vec()))
    }

    /// Whether the control tokens among `ids` are some of `written`, in their order.
    fn only(&self, ids: &[u32], written: &[u32]) -> bool {
        let mut written = written.iter();
        (ids.iter().filter(|id| self.ids.contains(id)))
            .all(|id| written.by_ref().any(|other| other == id))
    }

    fn found(&self, inner: &Inner, text: &str) -> Result<bool> {
        let ids = encode(inner, text, false)?;
        Ok(ids.iter().any(|id| self.ids.contains(id)))
    }

    fn pieces(&self, inner: &Inner, pieces: &[Piece]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Rendered(text) => ids.extend(encode(inner, text, false)?),
                Piece::Content(text) => self.content(text, &mut ids)?,
            }
        }
        Ok(ids)
    }

    /// The ids of a content. Where the model's own vocabulary leads to a control token, the text is cut in halves until it does not.
    fn content(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let found = encode(&self.plain, text, false)?;
        let first = text.chars().next().map_or(0, char::len_utf8);
        let middle = text.floor_char_boundary(text.len() / 2).max(first);
        let controls = |id: &u32| self.ids.contains(id) && Some(*id) != self.unknown;
        if middle == text.len() || !found.iter().any(controls) {
            ids.extend(found);
            return Ok(());
        }
        let (head, tail) = text.split_at(middle);
        self.content(head, ids)?;
        self.content(tail, ids)
    }
}

/// Letters, digits and white space (U+2581 is the `sentencepiece` library's).
fn is_text(character: char) -> bool {
    character.is_alphanumeric() || character.is_whitespace() || character == '\u{2581}'
}

fn unknown_token(inner: &Inner, json: &Value) -> Option<u32> {
    let model = &json["model"];
    let named = (model["unk_token"].as_str()).and_then(|token| inner.token_to_id(token));
    named.or_else(|| model["unk_id"].as_u64()?.try_into().ok())
}

/// The whole text of the pieces, and where in it the contents lie.
fn bodies(pieces: &[Piece]) -> (Vec<Range<usize>>, String) {
    let (mut bodies, mut text) = (Vec::new(), String::new());
    for piece in pieces {
        let start = text.len();
        text.push_str(piece.text());
        if matches!(piece, Piece::Content(_)) {
            bodies.push(start..text.len());
        }
    }
    (bodies, text)
}

/// A token's place without the white space that it took from beside it. Nothing where the library names no place in the text.
fn core(text: &str, place: Range<usize>) -> Option<Range<usize>> {
    let token = text.get(place.clone())?;
    let body = token.trim();
    if body.is_empty() {
        return (!token.is_empty()).then_some(place);
    }
    let start = place.start + token.len() - token.trim_start().len();
    Some(start..start + body.len())
}

/// Whether the place touches none of the bodies, which are in order.
fn clear(place: &Range<usize>, bodies: &[Range<usize>]) -> bool {
    let after = bodies.partition_point(|body| body.end <= place.start);
    bodies.get(after).is_none_or(|body| place.end <= body.start)
}

fn unusable(why: &str) -> Error {
    Error::data(format!("the text cannot be tokenised: {why}"))
}
