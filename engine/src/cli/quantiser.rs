//! The options of quantisers, the same in every command that has one.

use clap::Args;

use crate::calibrate::quantisers::awq::Awq;
use crate::calibrate::quantisers::gptq::{ActOrder, Gptq};
use crate::calibrate::quantisers::{Quantiser, Recipe};
use crate::error::{Error, Result};
use crate::quant::Scheme;

/// Which quantiser makes the weights, and how.
#[derive(Debug, Clone, Args)]
pub struct Quantising {
    /// rtn, smoothquant, gptq, awq or lut; the one that suits the scheme by default.
    #[arg(long, value_name = "NAME")]
    pub quantiser: Option<Quantiser>,
    /// gptq: what is added to the diagonal of the inputs' moments, as a share of its mean.
    #[arg(long, value_name = "SHARE", default_value_t = 0.01)]
    pub damp: f64,
    /// gptq: which columns are rounded first: `no` (as they stand), `weight` (the largest inputs, groups of neighbours) or `group` (the largest
    /// inputs, groups in that order: only for the layout gptq).
    #[arg(long, value_name = "ORDER", default_value = "weight")]
    pub act_order: ActOrder,
    /// gptq: read the texts once a layer, not once a place of it.
    #[arg(long)]
    pub no_true_sequential: bool,
    /// awq: never clip ranges.
    #[arg(long)]
    pub no_clip: bool,
}

impl Quantising {
    /// The recipe for a scheme.
    ///
    /// # Errors
    /// A setting that cannot work, or a quantiser that cannot make the scheme.
    pub fn recipe(&self, scheme: Scheme) -> Result<Recipe> {
        if !(self.damp > 0.0 && self.damp <= 1.0) {
            return Err(Error::plan(format!(
                "--damp is {}: write a number above 0 and at most 1, such as 0.01",
                self.damp
            )));
        }
        let quantiser = match self.quantiser.unwrap_or_else(|| Quantiser::suiting(scheme)) {
            Quantiser::Gptq(_) => Quantiser::Gptq(Gptq {
                damp: self.damp,
                act_order: self.act_order,
                true_sequential: !self.no_true_sequential,
            }),
            Quantiser::Awq(_) => Quantiser::Awq(Awq {
                clip: !self.no_clip,
            }),
            other => other,
        };
        let recipe = Recipe { scheme, quantiser };
        recipe.check()?;
        Ok(recipe)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        quantising: Quantising,
    }

    fn recipe(arguments: &[&str], scheme: &str) -> Result<String> {
        let command = Command::parse_from([&["test"], arguments].concat());
        let recipe = command.quantising.recipe(scheme.parse().unwrap())?;
        Ok(format!("{:?}", recipe.quantiser))
    }

    #[test]
    fn every_scheme_has_a_quantiser_that_suits_it() {
        for (scheme, wanted) in [
            ("W4A16-g64", "Gptq"),
            ("LUT4", "Lut"),
            ("W8A8", "SmoothQuant"),
            ("W8A16", "Rtn"),
            ("FP8", "Rtn"),
        ] {
            assert!(recipe(&[], scheme).unwrap().starts_with(wanted));
        }
        let settings = recipe(
            &["--damp", "0.1", "--act-order", "no", "--no-true-sequential"],
            "W4A16",
        )
        .unwrap();
        assert_eq!(
            settings,
            "Gptq(Gptq { damp: 0.1, act_order: No, true_sequential: false })"
        );
        let settings = recipe(&["--quantiser", "awq", "--no-clip"], "W4A16").unwrap();
        assert_eq!(settings, "Awq(Awq { clip: false })");
    }

    #[test]
    fn settings_that_cannot_work_are_refused_with_the_fix() {
        for damp in ["--damp=0", "--damp=-1", "--damp=2", "--damp=NaN"] {
            let error = recipe(&[damp], "W4A16").unwrap_err();
            assert!(error.message.contains("write a number above 0"), "{error}");
        }
        let error = recipe(&["--quantiser", "awq"], "LUT4").unwrap_err();
        assert!(error.message.contains("cannot make LUT4"), "{error}");
    }
}
