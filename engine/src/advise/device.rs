//! A device as a file describes it. YAML, of which JSON is a part.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{Error, Result, files};

/// More than a description of one device needs.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// What a device has and what of it is reached.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// For the heading.
    pub name: String,
    /// Memory for weights and cache, bytes.
    pub memory_bytes: f64,
    /// Of that memory, bytes a second.
    pub bandwidth_bytes_per_second: f64,
    /// Operations a second with BF16 operands; a multiplication and an addition are two.
    pub bf16_ops_per_second: f64,
    /// With INT8 operands, where the device has them.
    pub int8_ops_per_second: Option<f64>,
    /// With FP8 operands, where the device has them.
    pub fp8_ops_per_second: Option<f64>,
    /// The share of these rates that prefill reaches; 0.6 is usual.
    #[serde(default = "usual_prefill")]
    pub prefill_reach: f64,
    /// The share of the bandwidth that decode reaches; 0.8 is usual.
    #[serde(default = "usual_decode")]
    pub decode_reach: f64,
}

fn usual_prefill() -> f64 {
    0.6
}

fn usual_decode() -> f64 {
    0.8
}

impl Device {
    /// Reads a description.
    ///
    /// # Errors
    /// A file that cannot be read or is none, a field that is unknown, missing or out of range.
    pub fn read(path: &Path) -> Result<Self> {
        let named = |what: &dyn std::fmt::Display| {
            Error::data(format!("the device file {}: {what}", path.display()))
        };
        let text = files::read_text(path, MAX_FILE_BYTES).map_err(|error| named(&error))?;
        Self::parse(&text).map_err(|why| named(&why))
    }

    /// The same from its text.
    ///
    /// # Errors
    /// What is wrong, without the file's name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let device: Self = serde_norway::from_str(text).map_err(|error| error.to_string())?;
        let positive = [
            ("memoryBytes", Some(device.memory_bytes)),
            (
                "bandwidthBytesPerSecond",
                Some(device.bandwidth_bytes_per_second),
            ),
            ("bf16OpsPerSecond", Some(device.bf16_ops_per_second)),
            ("int8OpsPerSecond", device.int8_ops_per_second),
            ("fp8OpsPerSecond", device.fp8_ops_per_second),
        ];
        for (field, value) in positive {
            if value.is_some_and(|value| !(value.is_finite() && value > 0.0)) {
                return Err(format!("{field} must be a number above 0"));
            }
        }
        for (field, share) in [
            ("prefillReach", device.prefill_reach),
            ("decodeReach", device.decode_reach),
        ] {
            if !(share > 0.0 && share <= 1.0) {
                return Err(format!("{field} must lie above 0 and at most at 1"));
            }
        }
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str =
        "name: x\nmemoryBytes: 1e9\nbandwidthBytesPerSecond: 1e10\nbf16OpsPerSecond: 1e12\n";

    #[test]
    fn yaml_and_json_are_read_alike() {
        let yaml = Device::parse(WHOLE).unwrap();
        let json = serde_json::to_string(&yaml).unwrap();
        assert_eq!(Device::parse(&json).unwrap(), yaml);
        assert!((yaml.prefill_reach - 0.6).abs() < 1e-12 && yaml.int8_ops_per_second.is_none());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, what) in [
            (format!("{WHOLE}colour: red\n"), "colour"),
            (WHOLE.replace("1e9", "-1"), "memoryBytes must be"),
            (WHOLE.replace("1e9", ".nan"), "memoryBytes must be"),
            (WHOLE.replace("1e9", "much"), "memoryBytes"),
            (
                format!("{WHOLE}int8OpsPerSecond: 0\n"),
                "int8OpsPerSecond must be",
            ),
            (format!("{WHOLE}decodeReach: 1.5\n"), "decodeReach must lie"),
            (String::new(), "missing field"),
            ("[".to_owned(), ""),
        ] {
            let why = Device::parse(&text).unwrap_err();
            assert!(why.contains(what), "{text}: {why}");
        }
        let error = Device::read(Path::new("/nonexistent.yaml")).unwrap_err();
        assert!(error.message.contains("/nonexistent.yaml"), "{error}");
    }
}
