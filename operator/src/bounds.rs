//! How far samples can tell a number: bounds of quantiles and of proportions, and what repeated looks cost. Pure; used by `histogram` and `judge`.
//!
//! No model of latency: order statistics and the binomial distribution, whatever the samples' distribution is.

/// So many observations say all that a verdict needs; the bounds of more are as wide as theirs.
const ENOUGH: u64 = 200_000;

/// What of an error budget look number `look` (from 1) may spend, so that all looks of a growing window together spend about `budget`.
///
/// Looks are grouped by doublings of the window (look 1; 2 and 3; 4 to 7; …), for within a doubling they see mostly the same requests.
/// Group e spends `budget / (e (e + 1))`, which sums to `budget`.
pub fn spent(budget: f64, look: u64) -> f64 {
    let group = f64::from(look.max(1).ilog2() + 1);
    budget / (group * (group + 1.0))
}

/// The confidence of each of two equally uncertain bounds that together make one statement about their ratio at `confidence`.
pub fn paired(confidence: f64) -> f64 {
    normal_cdf(normal_quantile(confidence) / std::f64::consts::SQRT_2)
}

/// P(Z <= z) of the standard normal distribution, by Marsaglia's series (Journal of Statistical Software 11(4), 2004).
fn normal_cdf(z: f64) -> f64 {
    if z.abs() > 8.0 {
        return if z > 0.0 { 1.0 } else { 0.0 };
    }
    let square = z * z;
    let (mut sum, mut term, mut odd) = (z, z, 1.0);
    loop {
        odd += 2.0;
        term *= square / odd;
        let next = sum + term;
        if next.to_bits() == sum.to_bits() {
            break;
        }
        sum = next;
    }
    let density = (-0.5 * square).exp() / std::f64::consts::TAU.sqrt();
    0.5 + sum * density
}

/// The z of a probability in (0, 1), by bisection.
fn normal_quantile(probability: f64) -> f64 {
    bisect(-8.0, 8.0, |z| normal_cdf(z) < probability)
}

/// The place between `low` and `high` where `is_below` turns false.
fn bisect(mut low: f64, mut high: f64, is_below: impl Fn(f64) -> bool) -> f64 {
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if is_below(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    f64::midpoint(low, high)
}

/// `ceil(q n)`, in 1..=n.
pub(crate) fn nearest_rank(n: u64, q: f64) -> u64 {
    let mut rank = 1;
    // Bisection instead of a cast back from floating point.
    let mut above = n;
    while rank < above {
        let middle = rank + (above - rank) / 2;
        if as_f64(middle) >= q * as_f64(n) - 1e-9 {
            above = middle;
        } else {
            rank = middle + 1;
        }
    }
    rank
}

/// The largest rank that is below the quantile, and the smallest that is above it, each with `confidence`; `None` when no rank is.
pub(crate) fn bound_ranks(n: u64, q: f64, confidence: f64) -> (Option<u64>, Option<u64>) {
    if n > ENOUGH {
        let (lower, upper) = bound_ranks(ENOUGH, q, confidence);
        // Rounded away from the quantile on both sides.
        let scaled = u128::from(n);
        let down = |rank: u64| u128::from(rank) * scaled / u128::from(ENOUGH);
        let up = |rank: u64| (u128::from(rank) * scaled).div_ceil(u128::from(ENOUGH));
        let rank = |wide: u128| u64::try_from(wide).unwrap_or(n).clamp(1, n);
        return (
            lower.map(|lower| rank(down(lower))),
            upper.map(|upper| rank(up(upper))),
        );
    }
    let mut lower = None;
    let mut cumulative = 0.0;
    // What lies more than ten standard deviations below is less than 1e-20 and is passed over.
    let far = q - 10.0 * (q * (1.0 - q) / as_f64(n)).sqrt();
    let first = if n > 1000 && far > 0.0 {
        nearest_rank(n, far)
    } else {
        1
    };
    let log_odds = q.ln() - (1.0 - q).ln();
    let below = as_f64(first - 1);
    let mut log_probability =
        log_choose(n, first - 1) + below * q.ln() + (as_f64(n) - below) * (1.0 - q).ln();
    // `cumulative` is P(Bin(n, q) <= rank - 1) where it is compared: the true quantile lies at or above the observation of `rank` when
    // at least `rank` observations lie below it.
    for rank in first..=n {
        cumulative += log_probability.exp();
        if cumulative <= 1.0 - confidence {
            lower = Some(rank);
        }
        if cumulative >= confidence {
            return (lower, Some(rank));
        }
        log_probability += (as_f64(n - rank + 1) / as_f64(rank)).ln() + log_odds;
    }
    (lower, None)
}

/// The logarithm of the number of ways to choose `k` of `n`.
fn log_choose(n: u64, k: u64) -> f64 {
    log_factorial(n) - log_factorial(k) - log_factorial(n.saturating_sub(k))
}

/// Stirling's series, exact to 1e-10 from 10 on; below it the product itself.
fn log_factorial(n: u64) -> f64 {
    if n < 10 {
        return (1..=n).map(|factor| as_f64(factor).ln()).sum();
    }
    let x = as_f64(n);
    let series = 1.0 / (12.0 * x) - 1.0 / (360.0 * x.powi(3)) + 1.0 / (1260.0 * x.powi(5));
    x.mul_add(x.ln(), -x) + 0.5 * (std::f64::consts::TAU * x).ln() + series
}

/// The mean of what `differences` are samples of: an estimate, and with `confidence` each not below the first and not above the second of
/// two bounds; `None` of fewer than two. Student's t, which is exact where differences are normal and near it for the mean of a few that are not.
pub fn mean(differences: &[f64], confidence: f64) -> Option<(f64, (f64, f64))> {
    let freedom = u32::try_from(differences.len().checked_sub(1)?).ok()?;
    if freedom == 0 {
        return None;
    }
    let n = f64::from(freedom) + 1.0;
    let mean = differences.iter().sum::<f64>() / n;
    let squares: f64 = differences.iter().map(|one| (one - mean).powi(2)).sum();
    let error = (squares / f64::from(freedom) / n).sqrt();
    let t = bisect(0.0, 1e4, |t| student_cdf(t, freedom) < confidence);
    Some((mean, (mean - t * error, mean + t * error)))
}

/// P(T <= t) of Student's distribution for t >= 0, by its finite series (Abramowitz and Stegun 26.7.3 and 26.7.4).
fn student_cdf(t: f64, freedom: u32) -> f64 {
    let angle = (t / f64::from(freedom).sqrt()).atan();
    let (sine, cosine) = angle.sin_cos();
    let (mut term, mut power) = if freedom % 2 == 1 {
        (cosine, 1)
    } else {
        (1.0, 0)
    };
    let mut sum = 0.0;
    while power + 2 <= freedom {
        sum += term;
        let above = f64::from(power + 1) / f64::from(power + 2);
        term *= above * cosine * cosine;
        power += 2;
    }
    let within = if freedom % 2 == 1 {
        (angle + sine * sum) * std::f64::consts::FRAC_2_PI
    } else {
        sine * sum
    };
    f64::midpoint(1.0, within)
}

/// The proportion of which `events` of `n` were seen: not below the first and not above the second, each with `confidence`.
///
/// Exact (Clopper and Pearson, Biometrika 26, 1934) up to 20,000 events; beyond it Wilson's score interval, which is as good there.
pub fn proportion(events: u64, n: u64, confidence: f64) -> (f64, f64) {
    let events = events.min(n);
    if n == 0 {
        return (0.0, 1.0);
    }
    if events > ENOUGH / 10 {
        return wilson(events, n, confidence);
    }
    let lower = if events == 0 {
        0.0
    } else {
        // P(X >= events | p) rises with p.
        bisect(0.0, 1.0, |p| {
            1.0 - binomial_cdf(events - 1, n, p) < 1.0 - confidence
        })
    };
    let upper = if events == n {
        1.0
    } else {
        // P(X <= events | p) falls with p.
        bisect(0.0, 1.0, |p| binomial_cdf(events, n, p) > 1.0 - confidence)
    };
    (lower, upper)
}

fn wilson(events: u64, n: u64, confidence: f64) -> (f64, f64) {
    let (z, n) = (normal_quantile(confidence), as_f64(n));
    let estimate = as_f64(events) / n;
    let middle = estimate + z * z / (2.0 * n);
    let half = z * (estimate * (1.0 - estimate) / n + z * z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + z * z / n;
    ((middle - half) / scale, ((middle + half) / scale).min(1.0))
}

/// P(Bin(n, p) <= events).
fn binomial_cdf(events: u64, n: u64, p: f64) -> f64 {
    let log_odds = p.ln() - (1.0 - p).ln();
    let mut log_probability = as_f64(n) * (1.0 - p).ln();
    let mut cumulative = log_probability.exp();
    for k in 1..=events {
        log_probability += (as_f64(n - k + 1) / as_f64(k)).ln() + log_odds;
        cumulative += log_probability.exp();
    }
    cumulative
}

/// Counts as floating point: exact up to 2^53, far above any window.
#[expect(
    clippy::cast_precision_loss,
    reason = "a count above 2^53 would take centuries"
)]
pub(crate) fn as_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(actual: f64, expected: f64, tolerance: f64) {
        assert!(
            (actual - expected).abs() < tolerance,
            "{actual} is not {expected}"
        );
    }

    /// Known tables of distribution-free bounds: 59 is the least n whose maximum bounds the 95th percentile at 95 %.
    #[test]
    fn ranks_are_those_of_the_binomial_distribution() {
        assert_eq!(bound_ranks(58, 0.95, 0.95).1, None);
        assert_eq!(bound_ranks(59, 0.95, 0.95).1, Some(59));
        assert_eq!(bound_ranks(29, 0.90, 0.95).1, Some(29));
        assert_eq!(bound_ranks(28, 0.90, 0.95).1, None);
        // The median of 20: ranks 6 and 15 (two-sided 95.86 %), one-sided at 97.5 %.
        assert_eq!(bound_ranks(20, 0.5, 0.975), (Some(6), Some(15)));
        assert_eq!(bound_ranks(1, 0.5, 0.95), (None, None));
    }

    #[test]
    fn many_observations_keep_their_precision() {
        let (lower, upper) = bound_ranks(200_000, 0.95, 0.95);
        // 1.645 standard deviations of Bin(200000, 0.95) are 160.
        assert!(lower.unwrap().abs_diff(190_000 - 160) < 5, "{lower:?}");
        assert!(upper.unwrap().abs_diff(190_000 + 160) < 5, "{upper:?}");
        let (lower, upper) = bound_ranks(u64::MAX, 0.95, 0.95);
        let nines = u64::MAX / 100 * 95;
        assert!(lower.unwrap() < nines && nines < upper.unwrap());
    }

    #[test]
    fn bounds_of_any_number_of_observations_lie_close_around_the_quantile() {
        for n in [
            200_001,
            216_000,
            300_000,
            399_999,
            400_000,
            1_000_003,
            1 << 40,
        ] {
            for q in [0.5, 0.9, 0.95, 0.99] {
                let (lower, upper) = bound_ranks(n, q, 0.95);
                let expected = q * as_f64(n);
                for rank in [lower, upper].map(|rank| as_f64(rank.unwrap())) {
                    let off = (rank / expected - 1.0).abs();
                    assert!(off < 0.005, "{rank} of {n} for {q}");
                }
                assert!(as_f64(lower.unwrap()) < expected && expected < as_f64(upper.unwrap()));
            }
        }
    }

    #[test]
    fn passing_over_what_is_far_below_changes_no_rank() {
        // Ranks of 1001 and of 1000 observations are at most one apart, and only the first are found by a start far from 1.
        for (q, confidence) in [(0.5, 0.95), (0.9, 0.999), (0.99, 0.975)] {
            let (low, high) = bound_ranks(1000, q, confidence);
            let (low_1, high_1) = bound_ranks(1001, q, confidence);
            assert!(low_1.unwrap() - low.unwrap() <= 1, "{q} {confidence}");
            assert!(high_1.unwrap() - high.unwrap() <= 1, "{q} {confidence}");
        }
        // Of a set of 52 there are 2,598,960 hands of five.
        near(log_choose(52, 5).exp(), 2_598_960.0, 1.0);
    }

    /// Published tables of the normal distribution.
    #[test]
    fn normal_quantiles_are_those_of_the_tables() {
        for (probability, z) in [
            (0.5, 0.0),
            (0.95, 1.644_854),
            (0.975, 1.959_964),
            (0.999, 3.090_232),
        ] {
            near(normal_quantile(probability), z, 1e-5);
            near(normal_cdf(z), probability, 1e-6);
            near(normal_cdf(-z), 1.0 - probability, 1e-6);
        }
        near(normal_cdf(9.0), 1.0, 1e-12);
        near(paired(0.95), 0.8776, 1e-4);
    }

    /// Published tables of Student's distribution.
    #[test]
    fn means_are_bounded_as_student_does() {
        for (freedom, confidence, t) in [
            (1, 0.975, 12.706_2),
            (2, 0.975, 4.302_65),
            (7, 0.95, 1.894_58),
            (15, 0.99, 2.602_48),
            (30, 0.99, 2.457_26),
            (31, 0.95, 1.695_52),
        ] {
            near(student_cdf(t, freedom), confidence, 1e-6);
        }
        // The mean of 1, 2, 3, 4 is 2.5 and its standard error 0.6455.
        let (mean, (low, high)) = mean(&[1.0, 2.0, 3.0, 4.0], 0.975).unwrap();
        near(mean, 2.5, 1e-9);
        near(high, 2.5 + 3.182_45 * 0.645_497, 1e-4);
        near(low, 2.5 - 3.182_45 * 0.645_497, 1e-4);
        assert!(super::mean(&[], 0.95).is_none() && super::mean(&[1.0], 0.95).is_none());
        assert_eq!(super::mean(&[1.0; 5], 0.95), Some((1.0, (1.0, 1.0))));
    }

    /// Published tables: the rule of three, and 5 of 50 at one-sided 97.5 %.
    #[test]
    fn proportions_are_bounded_as_clopper_and_pearson_do() {
        near(proportion(0, 100, 0.95).1, 0.0295, 1e-4);
        let (lower, upper) = proportion(5, 50, 0.975);
        near(lower, 0.0333, 1e-4);
        near(upper, 0.2181, 1e-4);
        assert_eq!(proportion(0, 50, 0.95).0.to_bits(), 0.0_f64.to_bits());
        assert_eq!(proportion(50, 50, 0.95).1.to_bits(), 1.0_f64.to_bits());
        near(proportion(1, 50, 0.95).0, 0.001_025, 1e-5);
        assert_eq!(proportion(0, 0, 0.95), (0.0, 1.0));
    }

    #[test]
    fn very_many_events_are_bounded_too() {
        let (lower, upper) = proportion(100_000, 1_000_000, 0.975);
        near(lower, 0.1 - 1.96 * 0.0003, 1e-5);
        near(upper, 0.1 + 1.96 * 0.0003, 1e-5);
        let (lower, upper) = proportion(20_000, 200_000, 0.975);
        assert!(lower < 0.1 && 0.1 < upper);
    }

    #[test]
    fn all_looks_together_spend_no_more_than_the_budget() {
        let groups: f64 = (0..63).map(|group| spent(0.05, 1 << group)).sum();
        assert!(groups <= 0.05 && groups > 0.049, "{groups}");
        near(spent(0.05, 1), 0.025, 1e-12);
        near(spent(0.05, 3), spent(0.05, 2), 1e-12);
        near(spent(0.05, 0), 0.025, 1e-12);
        assert!(spent(0.05, u64::MAX) > 0.0);
    }
}
