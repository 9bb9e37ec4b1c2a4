//! How long a model takes until it answers, and the most memory that takes: one plan a process, since memory once used is never wholly given back.
//!
//! Also writes the checkpoint that is measured where no model is at hand: a shape's random weights.

use std::fmt;
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use half::bf16;
use mixquant_crds::{DecodeScheme, PrecisionPlan, PrefillScheme, WeightCopies};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::clock::{self, Seconds};
use super::{Shape, read_prompt, report, tokens};
use crate::model::{Model, Workspace};
use crate::{Error, Result};

/// Tokens of the prompt that is answered: every weight is read once.
const PROMPT: usize = 16;

/// What is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copies {
    /// The weights as they are stored, computing in BF16.
    Precise,
    /// Those and an INT8 copy that is made at load, as this says.
    Quantised(WeightCopies),
}

/// What loading took.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    /// Until the first answer.
    pub seconds: Seconds,
    /// Weights that the plan keeps.
    pub weight_bytes: usize,
    /// The most memory that this process held meanwhile, beyond what it held before.
    pub peak_bytes: u64,
}

impl FromStr for Copies {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "BF16" => Ok(Self::Precise),
            "Dual" => Ok(Self::Quantised(WeightCopies::Dual)),
            "OnTheFly" => Ok(Self::Quantised(WeightCopies::OnTheFly)),
            "Single" => Ok(Self::Quantised(WeightCopies::Single)),
            _ => Err("write BF16, Dual, OnTheFly or Single".to_owned()),
        }
    }
}

impl Copies {
    fn plan(self) -> PrecisionPlan {
        let mut plan = PrecisionPlan::precise(DecodeScheme::BF16);
        if let Self::Quantised(copies) = self {
            plan.prefill.scheme = PrefillScheme::W8A8;
            plan.weight_copies = copies;
            if copies == WeightCopies::Single {
                plan.decode.scheme = DecodeScheme::W8A8;
            }
        }
        plan
    }
}

/// Opens a model, makes the copies and answers a short prompt.
///
/// # Errors
/// A model that cannot be opened, and a system that does not tell how much memory was used.
pub fn load(directory: &Path, copies: Copies) -> Result<Load> {
    // Forgets the peak so far (Linux: proc(5), clear_refs).
    let forgotten = fs::write("/proc/self/clear_refs", "5");
    let before = report::peak_memory().filter(|_| forgotten.is_ok());
    let before = before.ok_or_else(|| {
        Error::internal("the system does not tell the peak of memory: measure on Linux")
    })?;
    let mut weight_bytes = 0;
    let seconds = clock::time(Duration::ZERO, || {
        let (mut model, plan) = (Model::open(directory)?, copies.plan());
        let linears = model.linears_of(&plan);
        model.attach(linears, None, plan)?;
        let mut cache = model.new_cache(PROMPT);
        let prompt = tokens(PROMPT, model.config().vocab_size);
        read_prompt(&model, &mut Workspace::default(), &mut cache, &prompt)?;
        weight_bytes = model.weight_bytes().total();
        Ok::<(), Error>(())
    })?;
    Ok(Load {
        seconds,
        weight_bytes,
        peak_bytes: report::peak_memory().unwrap_or(0).saturating_sub(before),
    })
}

impl fmt::Display for Load {
    #[expect(clippy::cast_precision_loss, reason = "bytes are below 2^53")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (weights, peak) = (self.weight_bytes as f64, self.peak_bytes as f64);
        write!(
            f,
            "ready in {:.2} s ({:.2} s of computing); weights {:.0} MB, at most {:.0} MB held: {:.2} times the weights + 100 MB",
            self.seconds.wall,
            self.seconds.cpu,
            weights / 1e6,
            peak / 1e6,
            (peak - 1e8).max(0.0) / weights
        )
    }
}

/// Writes a shape's checkpoint: `config.json` and `model.safetensors`, random weights in BF16, norms of ones.
///
/// # Errors
/// A directory that cannot be written, by name.
pub fn write(shape: Shape, directory: &Path) -> Result<()> {
    let failed = |error: std::io::Error| {
        Error::storage(format!(
            "{}: cannot be written ({error}): check the path and the space",
            directory.display()
        ))
    };
    fs::create_dir_all(directory).map_err(failed)?;
    let tensors = shape.tensors();
    let (mut header, mut end) = (Map::new(), 0);
    for (name, dimensions) in &tensors {
        let start = end;
        end += 2 * dimensions.iter().product::<usize>();
        let entry = json!({"dtype": "BF16", "shape": dimensions, "data_offsets": [start, end]});
        header.insert(name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string();
    // The numbers begin at a multiple of their size.
    header.push_str(&" ".repeat(header.len().next_multiple_of(64) - header.len()));
    let config = shape.fields().to_string();
    fs::write(directory.join("config.json"), config).map_err(failed)?;
    let file = File::create(directory.join("model.safetensors")).map_err(failed)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let len = (header.len() as u64).to_le_bytes();
    file.write_all(&len).map_err(failed)?;
    file.write_all(header.as_bytes()).map_err(failed)?;
    let pool = crate::model::random_values();
    for (_, dimensions) in &tensors {
        let mut left = dimensions.iter().product();
        while left > 0 {
            let count = pool.len().min(left);
            let ones;
            let values = if dimensions.len() == 1 {
                ones = vec![bf16::ONE; count];
                &ones[..]
            } else {
                &pool[..count]
            };
            file.write_all(bytemuck::cast_slice(values))
                .map_err(failed)?;
            left -= count;
        }
    }
    file.flush().map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_shape_opens_and_loads_in_every_memory_mode() {
        let directory = tempfile::tempdir().unwrap();
        write("micro".parse().unwrap(), directory.path()).unwrap();
        for copies in ["BF16", "Dual", "OnTheFly", "Single"] {
            let loaded = load(directory.path(), copies.parse().unwrap()).unwrap();
            assert!(loaded.weight_bytes > 0, "{copies}");
            assert!(loaded.to_string().contains("ready in"), "{copies}");
        }
        assert!("dual".parse::<Copies>().unwrap_err().contains("Single"));
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let error = write("micro".parse().unwrap(), Path::new("/proc/nowhere")).unwrap_err();
        assert!(error.message.contains("/proc/nowhere"), "{error}");
    }
}
