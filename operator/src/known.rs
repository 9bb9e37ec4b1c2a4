//! What a live read found out about an object beside the service, for as long as no watch says that the object changed: it spares
//! the API the reads whose answer a pass already had.
//!
//! Filled by `observe.rs`, emptied by `watches.rs`. Never a source of its own: nothing is kept of a kind that no watch has listed, nor
//! of a read during which anything of its kind happened, and a fact is read again after [`KEPT`], whatever the watches say.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt};

use crate::clock;

/// A watch that stands still without a word hides a change for so long at most.
pub const KEPT: Duration = Duration::from_mins(5);

/// Facts about objects: each is a question and its answer, in the words of who asks.
#[derive(Debug, Default)]
pub struct Known {
    kinds: Mutex<HashMap<String, OfKind>>,
}

/// One kind, as its watch tells it.
#[derive(Debug, Default)]
struct OfKind {
    /// Counts what the watch said.
    events: u64,
    /// Whether the watch has told all that there is.
    listed: bool,
    /// By namespace and name; then by question.
    facts: HashMap<(String, String), HashMap<String, Fact>>,
}

#[derive(Debug)]
struct Fact {
    answer: String,
    read: Instant,
}

/// A read that is under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    kind: String,
    namespace: String,
    name: String,
    events: u64,
}

impl Known {
    fn kinds(&self) -> MutexGuard<'_, HashMap<String, OfKind>> {
        self.kinds.lock().expect("no holder of this lock panics")
    }

    /// The answer to `question` about an object, where it still holds.
    pub fn recall<K: Resource<DynamicType = ()>>(
        &self,
        namespace: &str,
        name: &str,
        question: &str,
    ) -> Option<String> {
        self.recall_at(
            &K::kind(&()),
            (namespace, name),
            question,
            clock::monotonic(),
        )
    }

    fn recall_at(
        &self,
        kind: &str,
        (namespace, name): (&str, &str),
        question: &str,
        now: Instant,
    ) -> Option<String> {
        let kinds = self.kinds();
        let of_object = kinds
            .get(kind)?
            .facts
            .get(&(namespace.to_owned(), name.to_owned()))?;
        let fact = of_object.get(question)?;
        (now.saturating_duration_since(fact.read) < KEPT).then(|| fact.answer.clone())
    }

    /// Call it before the object is read; its answer is kept with what was found out.
    pub fn begin<K: Resource<DynamicType = ()>>(&self, namespace: &str, name: &str) -> Reading {
        let kind = K::kind(&()).into_owned();
        let events = self.kinds().get(&kind).map_or(0, |of_kind| of_kind.events);
        Reading {
            kind,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            events,
        }
    }

    /// Keeps what a read found out, unless anything of that kind happened since it began.
    pub fn keep(&self, reading: Reading, question: &str, answer: String) {
        self.keep_at(reading, question, answer, clock::monotonic());
    }

    fn keep_at(&self, reading: Reading, question: &str, answer: String, read: Instant) {
        let mut kinds = self.kinds();
        let Some(of_kind) = kinds.get_mut(&reading.kind) else {
            return;
        };
        if of_kind.listed && of_kind.events == reading.events {
            let object = (reading.namespace, reading.name);
            let facts = of_kind.facts.entry(object).or_default();
            facts.insert(question.to_owned(), Fact { answer, read });
        }
    }

    /// What a watch said. A watch that begins anew may have missed anything.
    pub fn heard<K: Resource<DynamicType = ()>>(&self, event: &Event<K>) {
        let mut kinds = self.kinds();
        let of_kind = kinds.entry(K::kind(&()).into_owned()).or_default();
        of_kind.events += 1;
        match event {
            Event::Init => {
                of_kind.listed = false;
                of_kind.facts.clear();
            }
            Event::InitDone => of_kind.listed = true,
            Event::Apply(object) | Event::InitApply(object) | Event::Delete(object) => {
                let namespace = object.namespace().unwrap_or_default();
                of_kind.facts.remove(&(namespace, object.name_any()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use proptest::prelude::*;

    use super::*;

    fn map(name: &str) -> ConfigMap {
        let mut map = ConfigMap::default();
        map.metadata.namespace = Some("models".into());
        map.metadata.name = Some(name.into());
        map
    }

    fn listed() -> Known {
        let known = Known::default();
        known.heard(&Event::<ConfigMap>::Init);
        known.heard(&Event::<ConfigMap>::InitDone);
        known
    }

    fn learn(known: &Known, name: &str, answer: &str) {
        let reading = known.begin::<ConfigMap>("models", name);
        known.keep(reading, "digest", answer.into());
    }

    fn recalled(known: &Known, name: &str) -> Option<String> {
        known.recall::<ConfigMap>("models", name, "digest")
    }

    #[test]
    fn an_answer_is_kept_until_the_object_changes_and_others_stay() {
        let known = listed();
        learn(&known, "texts", "a");
        learn(&known, "other", "b");
        assert_eq!(recalled(&known, "texts").as_deref(), Some("a"));
        known.heard(&Event::Apply(map("texts")));
        assert_eq!(recalled(&known, "texts"), None);
        assert_eq!(recalled(&known, "other").as_deref(), Some("b"));
        assert_eq!(known.recall::<ConfigMap>("else", "other", "digest"), None);
        assert_eq!(known.recall::<ConfigMap>("models", "other", "size"), None);
    }

    #[test]
    fn nothing_is_kept_of_a_kind_that_no_watch_has_listed() {
        let known = Known::default();
        learn(&known, "texts", "a");
        assert_eq!(recalled(&known, "texts"), None);
        known.heard(&Event::<ConfigMap>::Init);
        learn(&known, "texts", "a");
        assert_eq!(recalled(&known, "texts"), None);
    }

    #[test]
    fn a_watch_that_begins_anew_takes_everything_away() {
        let known = listed();
        learn(&known, "texts", "a");
        known.heard(&Event::<ConfigMap>::Init);
        assert_eq!(recalled(&known, "texts"), None);
        known.heard(&Event::<ConfigMap>::InitDone);
        assert_eq!(recalled(&known, "texts"), None);
    }

    #[test]
    fn an_answer_is_read_again_after_a_time_whatever_the_watch_says() {
        let known = listed();
        let reading = known.begin::<ConfigMap>("models", "texts");
        let now = clock::monotonic();
        known.keep_at(reading, "digest", "a".into(), now);
        let at = |later| known.recall_at("ConfigMap", ("models", "texts"), "digest", now + later);
        assert_eq!(at(KEPT / 2).as_deref(), Some("a"));
        assert_eq!(at(KEPT), None);
    }

    /// What happens to one object and to those who read it; its content is the number of changes so far.
    #[derive(Debug, Clone)]
    enum Happening {
        Changes,
        WatchTells,
        ReadBegins,
        ReadEnds,
        WatchBreaks,
        WatchLists,
    }

    fn happening() -> impl Strategy<Value = Happening> {
        prop_oneof![
            Just(Happening::Changes),
            Just(Happening::WatchTells),
            Just(Happening::ReadBegins),
            Just(Happening::ReadEnds),
            Just(Happening::WatchBreaks),
            Just(Happening::WatchLists),
        ]
    }

    proptest! {
        /// The object changes at any moment, the watch tells it later or lists anew, and a read's answer arrives whenever it likes: what
        /// is recalled is never older than what the watch has told.
        #[test]
        fn what_is_recalled_is_never_older_than_what_the_watch_has_told(
            happenings in proptest::collection::vec(happening(), 1..60)
        ) {
            let known = listed();
            let (mut content, mut told, mut up) = (0_u64, 0_u64, true);
            let mut reads: Vec<(Reading, u64)> = Vec::new();
            for happening in happenings {
                match happening {
                    Happening::Changes => content += 1,
                    Happening::WatchTells if up && told < content => {
                        told += 1;
                        known.heard(&Event::Apply(map("texts")));
                    }
                    // The server answers with what the object is now; the answer is on its way.
                    Happening::ReadBegins => reads.push((known.begin::<ConfigMap>("models", "texts"), content)),
                    Happening::ReadEnds if !reads.is_empty() => {
                        let (reading, answer) = reads.remove(0);
                        known.keep(reading, "digest", answer.to_string());
                    }
                    Happening::WatchBreaks if up => {
                        up = false;
                        known.heard(&Event::<ConfigMap>::Init);
                    }
                    Happening::WatchLists if !up => {
                        (up, told) = (true, content);
                        known.heard(&Event::InitApply(map("texts")));
                        known.heard(&Event::<ConfigMap>::InitDone);
                    }
                    _ => {}
                }
                if let Some(recalled) = recalled(&known, "texts") {
                    prop_assert!(recalled.parse::<u64>().unwrap() >= told, "{recalled} although the watch has told {told}");
                }
            }
        }
    }
}
