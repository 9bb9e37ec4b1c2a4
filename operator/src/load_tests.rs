//! What is kept of pods' answers.

use proptest::prelude::*;

use super::*;
use crate::observed::fixture::pod;

fn page(start: u64, requests: u64, waiting: f64) -> Scrape {
    let level = |level| Ok(Value::Level(level));
    Scrape {
        process_start: start,
        series: [
            (Series::Running, level(8.0)),
            (Series::Waiting, level(waiting)),
            (Series::KvUsage, level(0.5)),
            (Series::Answered, Ok(Value::Count(requests))),
            (Series::Errors, Ok(Value::Count(0))),
            (Series::Cancelled, Ok(Value::Count(0))),
            (Series::Rejected, Ok(Value::Count(0))),
        ]
        .into(),
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn loads() -> Loads {
    Loads::new(LoadWindow {
        revisions: vec!["stable".into()],
        keep: 60,
    })
}

fn last(loads: &Loads) -> Load {
    loads.entries().pop().unwrap()
}

type Answer = (ObservedPod, Result<Scrape, String>);

fn answer(uid: &str, requests: u64) -> Answer {
    (pod(uid, "stable"), Ok(page(1, requests, 3.0)))
}

#[test]
fn pods_are_added_up_and_requests_are_counted_from_the_first_look_of_each_process() {
    let mut loads = loads();
    loads.add(&[answer("a", 100), answer("b", 40)], at(0));
    assert_eq!(
        last(&loads),
        Load {
            at: at(0),
            pods: 2,
            silent: 0,
            running: 16.0,
            waiting: 6.0,
            kv_cache_usage: 1.0,
            requests: 0,
        }
    );
    // One more pod begins with what it has counted; the others go on.
    loads.add(&[answer("a", 110), answer("b", 45), answer("c", 7)], at(15));
    assert_eq!(last(&loads).requests, 15);
    // A restarted process counts from zero and is another one.
    let restarted = (pod("a", "stable"), Ok(page(2, 4, 0.0)));
    loads.add(&[restarted, answer("b", 46), answer("c", 9)], at(30));
    assert_eq!(last(&loads).requests, 18);
}

#[test]
fn a_pod_that_does_not_say_it_plainly_is_silent_and_goes_on_when_it_speaks_again() {
    let mut loads = loads();
    loads.add(&[answer("a", 100)], at(0));
    let mut half = page(1, 110, 0.0);
    half.series.remove(&Series::Rejected);
    loads.add(&[(pod("a", "stable"), Err("status 503".into()))], at(15));
    assert_eq!((last(&loads).pods, last(&loads).silent), (0, 1));
    loads.add(&[answer("a", 120)], at(30));
    assert_eq!(last(&loads).requests, 20);
    loads.add(&[(pod("a", "stable"), Ok(half))], at(45));
    assert_eq!((last(&loads).pods, last(&loads).silent), (0, 1));
    loads.add(&[answer("a", 135)], at(60));
    assert_eq!(last(&loads).requests, 35);
}

#[test]
fn only_ready_pods_of_the_revisions_that_take_traffic_count() {
    let mut loads = loads();
    let mut starting = pod("b", "stable");
    starting.ready = false;
    let mut leaving = pod("c", "stable");
    leaving.terminating = true;
    let answers = [
        answer("a", 1),
        (starting, Ok(page(1, 1, 9.0))),
        (leaving, Ok(page(1, 1, 9.0))),
        (pod("d", "canary"), Ok(page(1, 1, 9.0))),
    ];
    loads.add(&answers, at(0));
    assert_eq!((last(&loads).pods, last(&loads).silent), (1, 0));
}

proptest! {
    /// However often it is looked: entries lie apart, none is older than is asked for, and requests never fall.
    #[test]
    fn the_history_is_bounded_and_in_order(looks in prop::collection::vec((0_i64..40, 0_u64..1000, any::<bool>()), 1..200)) {
        let mut loads = loads();
        let mut now = 0;
        for (later, requests, speaks) in looks {
            now += later;
            let page = page(1, requests, 0.0);
            let answer = if speaks { Ok(page) } else { Err("no".into()) };
            loads.add(&[(pod("a", "stable"), answer)], at(now));
            let entries = loads.entries();
            for pair in entries.windows(2) {
                prop_assert!(pair[1].at.as_second() - pair[0].at.as_second() >= 5);
                prop_assert!(pair[0].requests <= pair[1].requests);
            }
            let (first, last) = (entries.first().unwrap(), entries.last().unwrap());
            prop_assert!(last.at.as_second() - first.at.as_second() <= 60);
        }
    }
}
