//! Bytes of tokens to text, one token at a time, and the search for stop strings in it.
//!
//! The worker calls it for every answer, streamed or not, so that both give the same text. What is handed out is never taken back.

use std::str::from_utf8;

/// Turns a stream of bytes into the text that `String::from_utf8_lossy` gives for all of them together.
#[derive(Debug, Default)]
pub struct Detokenizer {
    /// The beginning of a character whose rest has not come yet: at most 3 bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// The text that is certain after these bytes.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.pending.len());
        let mut consumed = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            consumed += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty()
                || (consumed + invalid.len() == self.pending.len() && unfinished(invalid))
            {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            consumed += invalid.len();
        }
        self.pending.drain(..consumed);
        text
    }

    /// The text of what is left when no byte follows.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }
}

/// Whether the bytes may still become a character.
fn unfinished(bytes: &[u8]) -> bool {
    from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

/// Finds the first stop string in a text that comes in pieces.
#[derive(Debug, Default)]
pub struct StopFinder {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string: always shorter than the longest one.
    held: String,
}

impl StopFinder {
    /// Looks for these strings, none of them empty.
    pub fn new(stops: Vec<String>) -> Self {
        debug_assert!(
            stops.iter().all(|stop| !stop.is_empty()),
            "an empty stop string stops at once"
        );
        Self {
            stops,
            held: String::new(),
        }
    }

    /// The text that is certain to lie before any stop string, and whether one was found right behind it.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held.push_str(text);
        let found = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()))
            .min();
        if let Some(at) = found {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.possible_beginning();
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The held text, when no more follows.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the longest end of the held text begins that a stop string begins with.
    fn possible_beginning(&self) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let first = self.held.len().saturating_sub(longest.saturating_sub(1));
        (first..self.held.len())
            .find(|at| {
                (self.held.get(*at..))
                    .is_some_and(|end| self.stops.iter().any(|stop| stop.starts_with(end)))
            })
            .unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(text: &str, stops: &[String]) -> (String, bool) {
        match stops
            .iter()
            .filter_map(|stop| text.find(stop.as_str()))
            .min()
        {
            Some(at) => (text[..at].to_owned(), true),
            None => (text.to_owned(), false),
        }
    }

    #[test]
    fn a_character_comes_out_with_its_last_byte() {
        let mut detokenizer = Detokenizer::default();
        assert_eq!(detokenizer.push(b"a\xF0\x9F"), "a");
        assert_eq!(detokenizer.push(b"\x98"), "");
        assert_eq!(detokenizer.push(b"\x80b"), "\u{1F600}b");
        assert_eq!(detokenizer.push(b"\xE2\x82"), "");
        assert_eq!(detokenizer.finish(), "\u{FFFD}");
    }

    #[test]
    fn a_stop_string_is_found_across_pieces_and_its_beginning_is_held_back() {
        let mut finder = StopFinder::new(vec!["END".to_owned(), "\n\n".to_owned()]);
        assert_eq!(finder.push("one E"), ("one ".to_owned(), false));
        assert_eq!(finder.push("N"), (String::new(), false));
        assert_eq!(finder.push("E"), ("EN".to_owned(), false));
        assert_eq!(finder.push("ND two"), (String::new(), true));
    }

    proptest! {
        /// Goal: streamed and whole text are equal. Method: random bytes and cut characters, cut anywhere.
        #[test]
        fn a_stream_decodes_as_the_whole_does(
            parts in prop::collection::vec(prop_oneof![
                "\\PC{0,3}".prop_map(String::into_bytes),
                prop::collection::vec(any::<u8>(), 0..4),
            ], 0..20),
            size in 1usize..5,
        ) {
            let bytes = parts.concat();
            let mut detokenizer = Detokenizer::default();
            let mut text: String = bytes.chunks(size).map(|chunk| detokenizer.push(chunk)).collect();
            text.push_str(&detokenizer.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
        }

        /// Goal: where the text is cut changes nothing. Method: few letters, so that stop strings begin, fail and overlap often.
        #[test]
        fn cuts_do_not_change_what_stops(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let mut finder = StopFinder::new(stops.clone());
            let (mut text, mut stopped) = (String::new(), false);
            let mut seen = String::new();
            for piece in &pieces {
                seen.push_str(piece);
                let (more, found) = finder.push(piece);
                text.push_str(&more);
                if found {
                    stopped = true;
                    break;
                }
            }
            if !stopped {
                text.push_str(&finder.finish());
            }
            prop_assert_eq!((text, stopped), whole(&seen, &stops));
        }
    }
}
