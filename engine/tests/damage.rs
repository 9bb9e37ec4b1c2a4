//! Damage in each kind of tensor, one after another: which line of defence sees it, and whether the answer stays the precise one.
//!
//! `cargo test -p mixquant-engine --test damage -- --nocapture` prints the table of `docs/safety-valve.md`. Files are damaged as a disk
//! or a memory would: the digests must see every one; then the same files are loaded with digest checks off, as if the damage had
//! happened after the load.

#![expect(clippy::unwrap_used, reason = "helpers of tests panic as tests do")]

mod jobs;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use mixquant_engine::artifact::golden::TOLERANCE;
use mixquant_engine::artifact::{Artifact, Check};
use mixquant_engine::calibrate;
use mixquant_engine::kernels;
use mixquant_engine::model::{LogitRows, Model, Workspace};
use mixquant_engine::tokenizer::{Special, Tokenizer};
use mixquant_engine::valve::audit::prompts_until_seen;
use mixquant_engine::valve::read::{Settings, Valve};
use mixquant_engine::valve::{Limits, Reason, Verdict, compare, judge};

/// Prompts that each damaged engine reads, and their length.
const PROMPTS: usize = 8;
const TOKENS: usize = 96;
/// The token that texts of this model begin with.
const FIRST: u32 = 0;
/// The layer whose tensors are damaged.
const LAYER: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    /// One output channel is 64 times too large.
    Scale,
    /// One number is NaN.
    Nan,
    /// One bit of one weight: the highest of an INT8 magnitude, the highest of a BF16 exponent.
    Bit,
}

/// A safetensors file in memory.
struct Shard {
    path: PathBuf,
    bytes: Vec<u8>,
    data: usize,
    header: serde_json::Value,
}

impl Shard {
    /// The file of `folder` that holds `tensor`.
    fn find(folder: &Path, tensor: &str) -> Self {
        for path in jobs::files(folder) {
            if path
                .extension()
                .is_none_or(|extension| extension != "safetensors")
            {
                continue;
            }
            let path = folder.join(path);
            let bytes = fs::read(&path).unwrap();
            let data =
                8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
            let header: serde_json::Value = serde_json::from_slice(&bytes[8..data]).unwrap();
            if header.get(tensor).is_some() {
                return Self {
                    path,
                    bytes,
                    data,
                    header,
                };
            }
        }
        panic!("{tensor} is in no file of {}", folder.display());
    }

    /// Puts the damaged bytes in place of the file, which is the healthy one under another name.
    fn replace(&self) {
        fs::remove_file(&self.path).unwrap();
        fs::write(&self.path, &self.bytes).unwrap();
    }

    /// The tensor's bytes and the length of one row of it in numbers.
    fn tensor(&mut self, name: &str) -> (&mut [u8], usize) {
        let number = |value: &serde_json::Value| usize::try_from(value.as_u64().unwrap()).unwrap();
        let entry = self.header[name].clone();
        let (start, end) = (
            number(&entry["data_offsets"][0]),
            number(&entry["data_offsets"][1]),
        );
        let row = entry["shape"].as_array().unwrap().last().map_or(1, number);
        (&mut self.bytes[self.data + start..self.data + end], row)
    }
}

/// Damages an artifact's tensor.
fn damage_quantised(artifact: &Path, linear: &str, damage: Damage) {
    const CHANNEL: usize = 3;
    let name = match damage {
        Damage::Scale | Damage::Nan => format!("{linear}.weight_scale"),
        Damage::Bit => format!("{linear}.weight"),
    };
    let mut shard = Shard::find(artifact, &name);
    let (bytes, row) = shard.tensor(&name);
    match damage {
        Damage::Scale | Damage::Nan => {
            let scale = &mut bytes[4 * CHANNEL..4 * CHANNEL + 4];
            let value = f32::from_le_bytes(scale[..].try_into().unwrap());
            let damaged = if damage == Damage::Nan {
                f32::NAN
            } else {
                value * 64.0
            };
            scale.copy_from_slice(&damaged.to_le_bytes());
        }
        Damage::Bit => bytes[CHANNEL * row + 5] ^= 0x40,
    }
    shard.replace();
}

/// Damages a model's tensor of BF16 numbers.
fn damage_precise(model: &Path, name: &str, damage: Damage) {
    let mut shard = Shard::find(model, name);
    let (bytes, row) = shard.tensor(name);
    // Of a vector the channel itself. Of embedding and head a token that the prompts hold.
    let channel = if name.contains("embed") || name.contains("head") {
        FIRST as usize
    } else {
        3
    };
    let (first, count) = if bytes.len() / 2 == row {
        (channel, 1)
    } else {
        (channel * row, row)
    };
    let mut edit = |index: usize, change: &dyn Fn(bf16) -> bf16| {
        let number = &mut bytes[2 * index..2 * index + 2];
        let value = bf16::from_le_bytes(number[..].try_into().unwrap());
        number.copy_from_slice(&change(value).to_le_bytes());
    };
    match damage {
        Damage::Scale => (first..first + count)
            .for_each(|index| edit(index, &|value| bf16::from_f32(value.to_f32() * 64.0))),
        Damage::Nan => edit(first, &|_| bf16::NAN),
        Damage::Bit => edit(first, &|value| bf16::from_bits(value.to_bits() ^ 0x4000)),
    }
    shard.replace();
}

/// What each line of defence said of one damage.
#[derive(Debug, Default)]
struct Seen {
    digest: bool,
    loader: bool,
    golden: bool,
    /// Prompts.
    valve: usize,
    audit: usize,
    /// Prompts whose answer is not the healthy engine's, by more than the limits allow.
    wrong: usize,
}

impl Seen {
    fn row(&self, of: &str, damage: Damage) -> String {
        let yes = |seen| if seen { "yes" } else { "no" };
        if self.loader {
            return format!("| {of} | {damage:?} | yes | yes | | | | | |");
        }
        #[expect(clippy::cast_precision_loss, reason = "a share of eight prompts")]
        let share = |count: usize| count as f64 / PROMPTS as f64;
        let caught = share(self.valve) + share(self.audit);
        let until = if self.valve > 0 {
            prompts_until_seen(100.0 * share(self.valve), 0.99)
        } else {
            prompts_until_seen(share(self.audit), 0.99)
        };
        let until = match until {
            Some(prompts) if caught > 0.0 => prompts.to_string(),
            _ => "-".to_owned(),
        };
        format!(
            "| {of} | {damage:?} | {} | no | {} | {}/{PROMPTS} | {}/{PROMPTS} | {until} | {}/{PROMPTS} |",
            yes(self.digest),
            yes(self.golden),
            self.valve,
            self.audit,
            self.wrong
        )
    }
}

struct Bench {
    model: PathBuf,
    artifact: PathBuf,
    folder: tempfile::TempDir,
    prompts: Vec<Vec<u32>>,
    /// The healthy engine's logits after each prompt, by the precise weights alone.
    healthy: Vec<Vec<f32>>,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("healthy");
        jobs::copy(&jobs::model(), &model);
        let artifact = jobs::artifact(&calibrate::Options {
            model: model.clone(),
            samples: 4,
            ..jobs::options(&folder.path().join("artifacts"), jobs::plan())
        });
        let tokenizer = Tokenizer::open(&model).unwrap();
        let text = fs::read_to_string(jobs::text()).unwrap();
        let ids = tokenizer.encode(&text, Special::None).unwrap();
        // Behind what calibration has read.
        let windows = ids[ids.len() / 2..].chunks_exact(TOKENS - 1).take(PROMPTS);
        let prompts: Vec<Vec<u32>> = windows.map(|window| [&[FIRST], window].concat()).collect();
        assert_eq!(prompts.len(), PROMPTS);
        let mut bench = Self {
            artifact,
            model,
            folder,
            prompts,
            healthy: Vec::new(),
        };
        let mut precise = open(&bench.model, &bench.artifact).unwrap();
        let mut plan = precise.plan().clone();
        plan.prefill.min_prompt_tokens = u32::MAX;
        precise.set_plan(plan).unwrap();
        bench.healthy = answers(&precise, &bench.prompts, 0.0)
            .map(|read| read.last)
            .collect();
        bench
    }

    /// The healthy files with one tensor damaged.
    fn damaged(&self, copy: &str, tensor: &str, damage: Damage) -> (PathBuf, PathBuf) {
        let place = self.folder.path().join("damaged");
        if place.exists() {
            fs::remove_dir_all(&place).unwrap();
        }
        let model = place.join("model");
        let artifact = place.join(self.artifact.file_name().unwrap());
        jobs::link(&self.model, &model);
        jobs::link(&self.artifact, &artifact);
        match copy {
            "quantised" => damage_quantised(&artifact, tensor, damage),
            _ => damage_precise(&model, tensor, damage),
        }
        (model, artifact)
    }

    fn judge(&self, copy: &str, tensor: &str, damage: Damage) -> Seen {
        let (model_files, artifact_files) = self.damaged(copy, tensor, damage);
        let checked = Artifact::open(&artifact_files, Check::Digests)
            .and_then(|artifact| artifact.attach_to(&mut Model::open(&model_files)?));
        let mut seen = Seen {
            digest: checked.is_err(),
            ..Seen::default()
        };
        let Ok(model) = open(&model_files, &artifact_files) else {
            seen.loader = true;
            return seen;
        };
        let artifact = Artifact::open(&artifact_files, Check::Nothing).unwrap();
        seen.golden = artifact.golden().unwrap().check(&model).is_err();
        for (read, healthy) in answers(&model, &self.prompts, 100.0).zip(&self.healthy) {
            match read.check.as_ref().unwrap().verdict {
                Verdict::Keep => {}
                Verdict::Fallback(Reason::Audit) => seen.audit += 1,
                Verdict::Fallback(_) => seen.valve += 1,
            }
            let limits = Limits::default();
            let near =
                judge(compare(&read.last, healthy, limits).as_ref(), limits) == Verdict::Keep;
            seen.wrong += usize::from(!near);
            let precise = copy == "quantised" && read.check.as_ref().unwrap().fallback().is_some();
            if precise {
                assert!(
                    bits(&read.last) == bits(healthy),
                    "{tensor}: a fallback is the precise answer"
                );
            }
        }
        seen
    }
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|logit| logit.to_bits()).collect()
}

fn open(model: &Path, artifact: &Path) -> mixquant_engine::Result<Model> {
    let mut model = Model::open(model)?;
    Artifact::open(artifact, Check::Nothing)?.attach_to(&mut model)?;
    Ok(model)
}

fn answers<'a>(
    model: &'a Model,
    prompts: &'a [Vec<u32>],
    shadow_audit_percent: f64,
) -> impl Iterator<Item = mixquant_engine::valve::read::Reading> + 'a {
    let settings = Settings {
        shadow_audit_percent,
        ..Settings::default()
    };
    let (mut valve, mut workspace) = (Valve::new(settings), Workspace::default());
    prompts.iter().map(move |prompt| {
        valve
            .read(
                model,
                (prompt, LogitRows::Last),
                prompt.len(),
                &mut workspace,
                None,
            )
            .unwrap()
    })
}

/// Goal: each kind of damage is seen by something, and what the valve sees changes no answer. Method: all of them, in files.
#[test]
fn every_kind_of_damage_is_seen_or_harmless() {
    let bench = Bench::new();
    let mut targets: Vec<(&str, &str, String)> = Vec::new();
    let linears = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    for linear in linears {
        targets.push((
            "quantised",
            linear,
            format!("model.layers.{LAYER}.{linear}"),
        ));
    }
    for linear in linears {
        targets.push((
            "precise",
            linear,
            format!("model.layers.{LAYER}.{linear}.weight"),
        ));
    }
    for (kind, tensor) in [
        (
            "norm",
            format!("model.layers.{LAYER}.input_layernorm.weight"),
        ),
        ("norm before the head", "model.norm.weight".to_owned()),
        ("embedding", "model.embed_tokens.weight".to_owned()),
        ("head", "lm_head.weight".to_owned()),
    ] {
        targets.push(("precise", kind, tensor));
    }
    println!(
        "| tensor | damage | digest | loader | golden | valve | audit | prompts to 99 % | wrong answers |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let mut unseen = BTreeMap::new();
    for (copy, kind, tensor) in &targets {
        for damage in [Damage::Scale, Damage::Nan, Damage::Bit] {
            let seen = bench.judge(copy, tensor, damage);
            println!("{}", seen.row(&format!("{copy} {kind}"), damage));
            assert!(
                seen.digest,
                "{copy} {kind} {damage:?}: the digests see every damage in a file"
            );
            let live = seen.loader || seen.golden || seen.valve + seen.audit > 0;
            assert!(
                live || seen.wrong == 0,
                "{copy} {kind} {damage:?}: wrong and unseen: {seen:?}"
            );
            // Behind the valve and an audit of every prompt a damaged quantised copy gives no wrong answer at all.
            assert!(
                *copy == "precise" || seen.wrong == 0,
                "{copy} {kind} {damage:?}: {seen:?}"
            );
            if !live {
                unseen.insert(format!("{copy} {kind}"), damage);
            }
        }
    }
    println!("\nseen by digests alone, and harmless within the valve's limits: {unseen:?}");
    assert!(
        unseen.values().all(|damage| *damage != Damage::Nan),
        "{unseen:?}"
    );
}

/// Goal: the golden answers tell damage from another instruction set. Method: every backend of this machine beside the kept answers.
#[test]
fn golden_answers_hold_on_every_instruction_set() {
    let bench = Bench::new();
    let mut model = open(&bench.model, &bench.artifact).unwrap();
    let artifact = Artifact::open(&bench.artifact, Check::Digests).unwrap();
    let golden = artifact.golden().unwrap();
    assert!(
        golden.answers.len() >= 2
            && golden
                .answers
                .iter()
                .all(|answer| answer.quantised.is_some())
    );
    for backend in kernels::available() {
        model.set_backend(backend);
        let apart = golden.check(&model).unwrap();
        println!("{}: {apart:.2e} nats", backend.name());
        assert!(apart < TOLERANCE / 2.0, "{}: {apart}", backend.name());
    }
}
