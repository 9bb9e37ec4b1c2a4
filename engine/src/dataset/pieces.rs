//! The ids of one long text, piece by piece: a tokenizer keeps about a hundred bytes beside each token while it reads.
//!
//! A text is cut only where the ids before the cut do not depend on what follows it, which is tried out and never assumed: a tokenizer may look
//! anywhere. A piece is read behind some text that stands before it, whose ids are dropped. The parent calls it. Pure.

use super::Encode;
use crate::error::{Error, Result};

/// Shorter texts are read whole, and pieces are not longer.
pub(super) const PIECE_BYTES: usize = 1 << 20;
/// What is read before and behind a cut, to see that it changes nothing.
const AROUND_BYTES: usize = 4 << 10;
/// Places that are tried for one cut.
const TRIED: usize = 16;

/// The ids of the whole text, read in pieces of at most `piece` bytes and what stands before them.
///
/// # Errors
/// A text that cannot be tokenised, or cut nowhere.
pub(super) fn ids(text: &str, tokenizer: &dyn Encode, piece: usize) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let (mut context, mut start) = (0, 0);
    loop {
        let end = match text.len() - start {
            rest if rest <= piece => text.len(),
            _ => cut(text, start, piece, tokenizer)?,
        };
        let before = tokenizer.ids(&text[context..start])?;
        let read = tokenizer.ids(&text[context..end])?;
        // Holds where the cut was tried; what is read behind it is longer now.
        let own = read.strip_prefix(&before[..]).ok_or_else(|| uncut(start))?;
        ids.extend_from_slice(own);
        if end == text.len() {
            return Ok(ids);
        }
        (context, start) = (around_before(text, end), end);
    }
}

/// Where the piece that begins at `start` ends: the last place within `piece` bytes, line ends first, that the ids before do not see across.
fn cut(text: &str, start: usize, piece: usize, tokenizer: &dyn Encode) -> Result<usize> {
    let end = text.floor_char_boundary(start + piece);
    let first = text.ceil_char_boundary(start + piece / 2).min(end);
    let places = |is_place: fn(u8, u8) -> bool| {
        let bytes = text.as_bytes();
        let all = (first..=end).rev();
        all.filter(move |at| is_place(bytes[at - 1], bytes[*at]))
            .take(TRIED)
    };
    let lines = places(|before, after| before == b'\n' && !after.is_ascii_whitespace());
    let words = places(|before, after| !before.is_ascii_whitespace() && after == b' ');
    for at in lines.chain(words) {
        let context = &text[around_before(text, at)..at];
        let behind = text.floor_char_boundary((at + AROUND_BYTES).min(text.len()));
        let more = &text[around_before(text, at)..behind];
        if tokenizer.ids(more)?.starts_with(&tokenizer.ids(context)?) {
            return Ok(at);
        }
    }
    Err(uncut(start))
}

/// Where the text that is read before a cut begins: at a line or a word, if there is one.
fn around_before(text: &str, at: usize) -> usize {
    let from = text.floor_char_boundary(at.saturating_sub(AROUND_BYTES));
    let found = |what: char| text[from..at].find(what);
    match (from, found('\n'), found(' ')) {
        (0, ..) => 0,
        (_, Some(line), _) if from + line + 1 < at => from + line + 1,
        (_, _, Some(word)) => from + word,
        _ => from,
    }
}

fn uncut(start: usize) -> Error {
    Error::data(format!(
        "the text from byte {start} on cannot be read in pieces: write it as JSON lines with one document a line"
    ))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::tokenizer::Tokenizer;

    fn shipped() -> Tokenizer {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m");
        Tokenizer::open(&directory).unwrap()
    }

    /// A tokenizer that sees `reach` bytes ahead: a token is a byte and whether there is an `x` in these.
    struct Seer {
        reach: usize,
        longest: Cell<usize>,
    }

    impl Encode for Seer {
        fn ids(&self, text: &str) -> Result<Vec<u32>> {
            self.longest.set(self.longest.get().max(text.len()));
            let bytes = text.as_bytes();
            let seen = |at: usize| &bytes[at..bytes.len().min(at + self.reach + 1)];
            let id = |at: usize| u32::from(bytes[at]) + 256 * u32::from(seen(at).contains(&b'x'));
            Ok((0..bytes.len()).map(id).collect())
        }

        fn bos(&self) -> Option<u32> {
            None
        }

        fn vocab_size(&self) -> usize {
            512
        }

        fn conversation(&self, _: &Value) -> Result<Vec<u32>> {
            Ok(Vec::new())
        }
    }

    fn seer(reach: usize) -> Seer {
        Seer {
            reach,
            longest: Cell::new(0),
        }
    }

    #[test]
    fn a_text_in_pieces_has_the_ids_of_the_whole() {
        let text = include_str!("../../../e2e/data/evaluation.txt");
        let tokenizer = shipped();
        let whole = tokenizer.ids(text).unwrap();
        for piece in [700, 5_000, 20_000] {
            assert_eq!(ids(text, &tokenizer, piece).unwrap(), whole, "{piece}");
        }
    }

    #[test]
    fn no_more_than_a_piece_and_its_surroundings_is_ever_read_at_once() {
        let text = "some words of a line\n".repeat(10_000);
        let tokenizer = seer(0);
        let read = ids(&text, &tokenizer, 10_000).unwrap();
        assert_eq!(read.len(), text.len());
        assert!(tokenizer.longest.get() <= 10_000 + 2 * AROUND_BYTES);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn where_a_tokenizer_sees_across_a_cut_another_is_taken_or_the_text_is_refused(
            lines in prop::collection::vec("[abx ]{0,60}", 1..60), reach in 0_usize..40,
        ) {
            let text = lines.join("\n");
            let tokenizer = seer(reach);
            match ids(&text, &tokenizer, 200) {
                Ok(read) => prop_assert_eq!(read, tokenizer.ids(&text).unwrap()),
                Err(error) => prop_assert!(error.message.contains("JSON lines"), "{}", error),
            }
        }
    }

    #[test]
    fn a_text_without_lines_or_words_is_refused_with_the_fix() {
        let error = ids(&"\u{e9}".repeat(500), &seer(0), 200).unwrap_err();
        assert!(error.message.contains("from byte 0 on"), "{error}");
    }
}
