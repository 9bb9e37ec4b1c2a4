//! The arguments of the safety valve and of its difference log.

use std::path::PathBuf;

use clap::Args;
use mixquant_crds::names::valve_defaults as defaults;

use crate::valve::Limits;
use crate::valve::log::Options;
use crate::valve::read::Settings;

/// What the safety valve lets pass, and what it keeps.
#[derive(Debug, Clone, Args)]
pub struct ValveArguments {
    /// KL(precise ‖ quantised) of the first token, nats, above which a prompt is read again precisely.
    #[arg(long, value_name = "NATS", default_value_t = defaults::MAX_KL, value_parser = not_negative)]
    pub valve_max_kl: f64,
    /// Another most likely token counts where the precise logits of the two most likely ones are at least so far apart.
    #[arg(long, value_name = "LOGITS", default_value_t = defaults::MIN_MARGIN, value_parser = not_negative)]
    pub valve_min_margin: f64,
    /// Percent of the quantised prompts that are also read precisely, as ground truth.
    #[arg(long, value_name = "PERCENT", default_value_t = defaults::SHADOW_AUDIT_PERCENT, value_parser = percent)]
    pub shadow_audit_percent: f64,
    /// Where the random choice of audited prompts begins.
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub shadow_audit_seed: u64,
    /// A JSON line for each prompt that was read again goes here; the older half to FILE.1.
    #[arg(long, value_name = "FILE")]
    pub difference_log: Option<PathBuf>,
    /// Both files together have at most so many bytes.
    #[arg(long, value_name = "N", default_value_t = 16 << 20, requires = "difference_log")]
    pub difference_log_bytes: u64,
    /// Records hold the prompt's text; without it only its digest.
    #[arg(long, requires = "difference_log")]
    pub difference_log_text: bool,
}

impl ValveArguments {
    /// How the valve works.
    pub fn settings(&self) -> Settings {
        Settings {
            limits: Limits {
                max_kl: self.valve_max_kl,
                min_margin: self.valve_min_margin,
            },
            shadow_audit_percent: self.shadow_audit_percent,
            seed: self.shadow_audit_seed,
        }
    }

    /// Where differences go, if anywhere.
    pub fn log(&self) -> Option<Options> {
        self.difference_log.as_ref().map(|file| Options {
            file: file.clone(),
            bytes: self.difference_log_bytes,
            text: self.difference_log_text,
        })
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("give a number of at least 0, such as 0.05".to_owned()),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if (0.0..=100.0).contains(&number) => Ok(number),
        _ => Err("give a number from 0 to 100".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_numbers_in_their_range() {
        for wrong in ["-1", "NaN", "inf", "x", ""] {
            assert!(
                not_negative(wrong).is_err() && percent(wrong).is_err(),
                "{wrong}"
            );
        }
        assert!(percent("100.5").is_err());
        assert_eq!(percent("1"), Ok(1.0));
        assert_eq!(not_negative("0.05"), Ok(0.05));
    }
}
