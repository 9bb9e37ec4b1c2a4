//! The decision alone: rows of logits in, keep or fall back out.

use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits {
    max_kl: 0.05,
    min_margin: 0.5,
};

fn decide(quantised: &[f32], precise: &[f32]) -> Verdict {
    judge(compare(quantised, precise, LIMITS).as_ref(), LIMITS)
}

#[test]
fn equal_logits_are_kept() {
    let row = [1.0, 3.0, -2.0];
    let comparison = compare(&row, &row, LIMITS).unwrap();
    assert!(comparison.kl < 1e-12 && (comparison.margin - 2.0).abs() < 1e-12);
    assert_eq!(decide(&row, &row), Verdict::Keep);
}

#[test]
fn another_token_counts_only_where_the_precise_logits_are_sure() {
    // Both orders of a near tie: KL is small, so only the margin decides.
    assert_eq!(decide(&[1.0, 1.1, -9.0], &[1.1, 1.0, -9.0]), Verdict::Keep);
    let tie = compare(&[1.0, 1.1], &[1.1, 1.0], LIMITS).unwrap();
    assert_eq!(tie.agreement, Agreement::Tie);
    assert_eq!(
        decide(&[1.0, 1.1, -9.0], &[1.6, 1.0, -9.0]),
        Verdict::Fallback(Reason::Top1)
    );
}

#[test]
fn the_same_token_with_another_distribution_falls_back() {
    assert_eq!(
        decide(&[9.0, 0.0, 0.0], &[1.0, 0.0, 0.0]),
        Verdict::Fallback(Reason::Kl)
    );
}

#[test]
fn what_is_no_number_falls_back_on_either_side() {
    for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (quantised, precise) in [([wrong, 1.0], [0.0, 1.0]), ([0.0, 1.0], [0.0, wrong])] {
            assert_eq!(decide(&quantised, &precise), Verdict::Fallback(Reason::Nan));
        }
    }
    let masked = [f32::NEG_INFINITY; 3];
    assert_eq!(decide(&masked, &masked), Verdict::Fallback(Reason::Nan));
    assert_eq!(decide(&[], &[]), Verdict::Fallback(Reason::Nan));
}

#[test]
fn limits_that_are_no_numbers_let_nothing_pass() {
    let limits = Limits {
        max_kl: f64::NAN,
        ..LIMITS
    };
    let comparison = compare(&[1.0, 0.0], &[1.0, 0.0], limits);
    assert_eq!(
        judge(comparison.as_ref(), limits),
        Verdict::Fallback(Reason::Kl)
    );
}

proptest! {
    #[test]
    fn kl_is_that_of_the_definition(rows in proptest::collection::vec((-20.0_f32..20.0, -20.0_f32..20.0), 1..40)) {
        let (q, p): (Vec<f32>, Vec<f32>) = rows.into_iter().unzip();
        let softmax = |row: &[f32]| {
            let weights: Vec<f64> = row.iter().map(|logit| f64::from(*logit).exp()).collect();
            let sum: f64 = weights.iter().sum();
            weights.into_iter().map(|weight| weight / sum).collect::<Vec<_>>()
        };
        let (q_all, p_all) = (softmax(&q), softmax(&p));
        let expected: f64 = p_all.iter().zip(&q_all).map(|(p, q)| p * (p / q).ln()).sum();
        let found = compare(&q, &p, LIMITS).unwrap();
        prop_assert!((found.kl - expected.max(0.0)).abs() < 1e-6 * (1.0 + expected), "{} and {expected}", found.kl);
    }

    #[test]
    fn the_margin_is_the_lead_over_the_second(row in proptest::collection::vec(-20.0_f32..20.0, 2..40)) {
        let mut sorted = row.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let expected = f64::from(sorted[0]) - f64::from(sorted[1]);
        prop_assert!((compare(&row, &row, LIMITS).unwrap().margin - expected).abs() < 1e-12);
    }

    #[test]
    fn tighter_limits_never_let_more_pass(rows in proptest::collection::vec((-3.0_f32..3.0, -3.0_f32..3.0), 2..10), kl in 0.0_f64..1.0, margin in 0.0_f64..2.0) {
        let (q, p): (Vec<f32>, Vec<f32>) = rows.into_iter().unzip();
        let decide = |limits| judge(compare(&q, &p, limits).as_ref(), limits);
        let loose = Limits { max_kl: kl, min_margin: margin };
        let tight = Limits { max_kl: kl / 2.0, min_margin: margin / 2.0 };
        prop_assert!(decide(loose) == Verdict::Keep || decide(tight) != Verdict::Keep);
    }
}
