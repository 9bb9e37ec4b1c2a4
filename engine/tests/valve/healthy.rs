//! Healthy traffic passes: a copy without damage is hardly ever read again, and what the valve costs is counted, not timed.

use std::collections::BTreeMap;

use mixquant_engine::model::{LogitRows, Workspace};
use mixquant_engine::tokenizer::Tokenizer;
use mixquant_engine::valve::read::{Check, Valve};

use crate::fixture::{directory, model, settings, traffic};

/// Prompts of each file; `MIXQUANT_PROMPTS` sets another number.
const MOST: usize = 30;

#[test]
fn healthy_traffic_falls_back_on_less_than_one_percent_and_costs_one_step_and_the_audit() {
    let (model, tokenizer) = (model(), Tokenizer::open(&directory()).unwrap());
    let most = std::env::var("MIXQUANT_PROMPTS").map_or(MOST, |text| text.parse().unwrap());
    let prompts = traffic(&tokenizer, most);
    assert!(
        prompts.len() >= most.min(60),
        "only {} prompts",
        prompts.len()
    );
    let mut valve = Valve::new(settings(1.0));
    let mut workspace = Workspace::default();
    let (mut audited, mut fallbacks, mut steps, mut again) = (0, BTreeMap::new(), 0, 0);
    let mut kls = Vec::new();
    for prompt in &prompts {
        let reading = valve
            .read(
                &model,
                (prompt, LogitRows::Last),
                prompt.len(),
                &mut workspace,
                None,
            )
            .unwrap();
        let check = reading.check.as_ref().unwrap();
        kls.push(check.comparison.unwrap().kl);
        if let Some(reason) = Check::fallback(check) {
            *fallbacks.entry(reason.word()).or_insert(0_usize) += 1;
            println!("{reason:?}: {check:?}");
        }
        audited += usize::from(check.audit.is_some());
        steps += reading.work.valve;
        again += usize::from(reading.work.precise > 0);
        assert_eq!(reading.work.quantised, prompt.len());
    }
    kls.sort_by(f64::total_cmp);
    let total: usize = fallbacks.values().sum();
    println!(
        "{} prompts: {total} fallbacks {fallbacks:?}, {audited} audited, KL median {:.2e} p99 {:.2e} largest {:.2e}",
        prompts.len(),
        kls[kls.len() / 2],
        kls[kls.len() * 99 / 100],
        kls[kls.len() - 1],
    );
    // Fewer than 100 prompts cannot show a share below 1 %: then one is one too many only with a second.
    assert!(
        total * 100 < prompts.len().max(101),
        "{fallbacks:?} of {}",
        prompts.len()
    );
    assert_eq!(steps, prompts.len(), "one step a prompt");
    assert!(
        again <= audited + total,
        "precise prefills are audits and fallbacks"
    );
}
