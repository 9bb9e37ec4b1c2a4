//! The scheduler's promises, on random sequences of operations and on the few cases that are worth reading.

use proptest::prelude::*;

use super::*;

fn scheduler(max_batch_size: usize, kv_capacity_tokens: usize) -> Scheduler {
    Scheduler::new(Limits {
        max_batch_size,
        kv_capacity_tokens,
    })
}

#[test]
fn prompts_and_decode_steps_take_turns() {
    let mut scheduler = scheduler(4, 100);
    for id in 0..3 {
        assert!(scheduler.add(SequenceId(id), 10));
    }
    let [a, b, c] = [0, 1, 2].map(SequenceId);
    let steps: Vec<Batch> = (0..7).map(|_| scheduler.schedule()).collect();
    let expected = [
        Batch::Prefill(a),
        Batch::Decode(vec![a]),
        Batch::Prefill(b),
        Batch::Decode(vec![a, b]),
        Batch::Prefill(c),
        Batch::Decode(vec![a, b, c]),
        Batch::Decode(vec![a, b, c]),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn a_sequence_that_could_never_run_is_refused() {
    let mut scheduler = scheduler(4, 100);
    assert!(!scheduler.add(SequenceId(0), 101));
    assert!(scheduler.add(SequenceId(1), 100));
    assert_eq!(scheduler.schedule(), Batch::Prefill(SequenceId(1)));
}

#[test]
fn the_first_of_the_queue_is_never_overtaken_by_a_smaller_one() {
    let mut scheduler = scheduler(4, 100);
    let [large, huge, small] = [0, 1, 2].map(SequenceId);
    assert!(scheduler.add(large, 60) && scheduler.add(huge, 90) && scheduler.add(small, 1));
    assert_eq!(scheduler.schedule(), Batch::Prefill(large));
    for _ in 0..5 {
        assert_eq!(scheduler.schedule(), Batch::Decode(vec![large]));
    }
    scheduler.commit(&[large]);
    assert_eq!(scheduler.schedule(), Batch::Prefill(huge));
}

#[derive(Debug, Clone)]
enum Operation {
    Add(usize),
    Step,
    /// Ends the running or waiting sequence at this place of all that were ever added.
    Remove(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        3 => (1usize..60).prop_map(Operation::Add),
        4 => Just(Operation::Step),
        1 => (0usize..60).prop_map(Operation::Remove),
    ]
}

proptest! {
    /// Goal: limits hold, the order is first come first served, nothing leaks, nobody starves.
    /// Method: random operations against a plain list of what was added.
    #[test]
    fn limits_order_and_accounts_hold(
        max_batch_size in 1usize..5,
        capacity in 20usize..100,
        operations in prop::collection::vec(operation(), 1..120),
    ) {
        let mut scheduler = scheduler(max_batch_size, capacity);
        let mut sizes = Vec::new();
        let mut started = Vec::new();
        let mut without_decode = 0;
        for operation in operations {
            match operation {
                Operation::Add(tokens) => {
                    let id = SequenceId(sizes.len() as u64);
                    prop_assert_eq!(scheduler.add(id, tokens), tokens <= capacity);
                    sizes.push(tokens);
                }
                Operation::Remove(index) => {
                    let id = SequenceId(index as u64);
                    scheduler.remove(id);
                    prop_assert!(!scheduler.remove(id), "removed twice");
                }
                Operation::Step => match scheduler.schedule() {
                    Batch::Idle => prop_assert_eq!((scheduler.running(), scheduler.waiting()), (0, 0)),
                    Batch::Prefill(id) => {
                        prop_assert!(started.last().is_none_or(|last| *last < id), "out of order");
                        started.push(id);
                        without_decode += 1;
                        prop_assert!(without_decode <= 1 || scheduler.running() == 1, "decode starves");
                    }
                    Batch::Decode(ids) => {
                        without_decode = 0;
                        prop_assert_eq!(ids.len(), scheduler.running());
                        prop_assert!(ids.iter().all(|id| started.contains(id)), "decoded before its prompt was read");
                    }
                },
            }
            let reserved: usize = scheduler.running.iter().map(|entry| sizes[usize::try_from(entry.id.0).unwrap()]).sum();
            prop_assert_eq!(scheduler.reserved_tokens(), reserved);
            prop_assert!(scheduler.running() <= max_batch_size && reserved <= capacity);
        }
        // Whatever is left can be served to the end, and then nothing is held.
        for _ in 0..4 * sizes.len() + 4 {
            let ids = match scheduler.schedule() {
                Batch::Idle => break,
                Batch::Prefill(id) => vec![id],
                Batch::Decode(ids) => ids,
            };
            scheduler.commit(&ids);
        }
        prop_assert_eq!((scheduler.running(), scheduler.waiting(), scheduler.reserved_tokens()), (0, 0, 0));
    }
}
