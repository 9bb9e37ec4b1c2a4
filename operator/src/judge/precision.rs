//! The precision gate: a Job's report against `spec.verification`.

use mixquant_crds::VerifyReport;
use mixquant_crds::status::Outcome;

use crate::validate::PrecisionLimits;

/// The precision gate. The report's numbers are measured on fixed texts, so they decide: the outcome is Pass or Fail, with the
/// numbers in one line.
pub fn precision(report: &VerifyReport, limits: &PrecisionLimits) -> (Outcome, String) {
    // Written so that a number that is none (NaN) keeps no limit.
    let checks = [
        (
            report.perplexity_increase_percent <= limits.max_perplexity_increase,
            format!(
                "perplexity increase {:.3} % (limit {} %, {:.4} over baseline {:.4})",
                report.perplexity_increase_percent,
                limits.max_perplexity_increase,
                report.perplexity,
                report.baseline_perplexity,
            ),
        ),
        (
            report.top1_agreement_percent >= limits.min_top1_agreement,
            format!(
                "top-1 agreement {:.2} % (limit {} %)",
                report.top1_agreement_percent, limits.min_top1_agreement
            ),
        ),
        (
            report.kl_p99 <= limits.max_kl_p99,
            format!("KL p99 {:.4} (limit {})", report.kl_p99, limits.max_kl_p99),
        ),
        (report.tokens > 0, format!("{} tokens", report.tokens)),
    ];
    let outcome = if checks.iter().all(|(kept, _)| *kept) {
        Outcome::Pass
    } else {
        Outcome::Fail
    };
    let numbers = |wanted: bool| -> Vec<&str> {
        let these = checks.iter().filter(|(kept, _)| *kept == wanted);
        these.map(|(_, text)| text.as_str()).collect()
    };
    let message = match outcome {
        Outcome::Pass | Outcome::Inconclusive => numbers(true).join(", "),
        Outcome::Fail => {
            let worst = report.worst_slice.as_ref().map_or(String::new(), |slice| {
                format!(
                    "; worst slice {} with perplexity increase {:.3} %",
                    slice.name, slice.perplexity_increase_percent
                )
            });
            let kept = numbers(true);
            let separator = if kept.is_empty() { "" } else { "; kept: " };
            format!(
                "outside the limits: {}{separator}{}{worst}",
                numbers(false).join(", "),
                kept.join(", "),
            )
        }
    };
    (outcome, message)
}

#[cfg(test)]
mod tests {
    use mixquant_crds::Slice;

    use super::*;

    const LIMITS: PrecisionLimits = PrecisionLimits {
        max_perplexity_increase: 1.0,
        min_top1_agreement: 95.0,
        max_kl_p99: 0.1,
    };

    fn report() -> VerifyReport {
        VerifyReport {
            baseline_perplexity: 8.0,
            perplexity: 8.04,
            perplexity_increase_percent: 0.5,
            kl_mean: 0.001,
            kl_p99: 0.05,
            top1_agreement_percent: 97.0,
            worst_slice: None,
            tokens: 1000,
            artifact_digest: None,
        }
    }

    #[test]
    fn precision_at_its_limits_passes_and_beyond_one_of_them_fails() {
        let judged = |change: fn(&mut VerifyReport)| {
            let mut report = report();
            change(&mut report);
            precision(&report, &LIMITS).0
        };
        assert_eq!(judged(|_| {}), Outcome::Pass);
        assert_eq!(
            judged(|report| report.perplexity_increase_percent = 1.0),
            Outcome::Pass
        );
        let broken: [fn(&mut VerifyReport); 7] = [
            |report| report.perplexity_increase_percent = 1.001,
            |report| report.top1_agreement_percent = 94.9,
            |report| report.kl_p99 = 0.11,
            |report| report.tokens = 0,
            |report| report.perplexity_increase_percent = f64::NAN,
            |report| report.kl_p99 = f64::INFINITY,
            |report| report.top1_agreement_percent = f64::NAN,
        ];
        for change in broken {
            assert_eq!(judged(change), Outcome::Fail);
        }
    }

    #[test]
    fn a_precision_failure_tells_numbers_limits_and_the_worst_slice() {
        let mut report = report();
        report.perplexity_increase_percent = 7.5;
        report.worst_slice = Some(Slice {
            name: "code".into(),
            perplexity_increase_percent: 31.0,
            kl_mean: 0.4,
            top1_agreement_percent: 60.0,
            tokens: 200,
        });
        let message = precision(&report, &LIMITS).1;
        for part in [
            "7.500 % (limit 1 %",
            "97.00 % (limit 95 %)",
            "code",
            "31.000 %",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
