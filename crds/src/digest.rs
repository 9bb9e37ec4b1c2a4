//! Content digests: how models, artifacts, Job inputs and revisions are named. Used by both sides; never truncated where it is compared.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest in the form `sha256:<64 lower-case hex digits>`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// Why a text is not a digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a digest: write sha256: and 64 lower-case hex digits")]
pub struct DigestError(String);

impl Digest {
    /// The digest of `bytes`.
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self::from_hash(Sha256::digest(bytes).as_slice())
    }

    /// The digest of a value's canonical JSON: keys sorted at every level, no white space.
    ///
    /// # Errors
    /// When the value cannot be written as JSON (a map with keys that are not strings).
    pub fn of_json<T: Serialize>(value: &T) -> Result<Self, serde_json::Error> {
        // `serde_json::Value` keeps its maps sorted, so the way through it is canonical.
        let value = serde_json::to_value(value)?;
        Ok(Self::of_bytes(&serde_json::to_vec(&value)?))
    }

    /// Wraps a finished SHA-256 (32 bytes), for callers that hash a stream.
    pub fn from_hash(hash: &[u8]) -> Self {
        debug_assert_eq!(hash.len(), 32, "a SHA-256 has 32 bytes");
        let mut text = String::with_capacity(71);
        text.push_str("sha256:");
        for byte in hash {
            write!(text, "{byte:02x}").expect("writing to a String cannot fail");
        }
        Self(text)
    }

    /// The 64 hex digits without the `sha256:` in front, as used in file names.
    pub fn hex(&self) -> &str {
        &self.0[7..]
    }

    /// The first ten hex digits, as used in object names. Never compare these: compare digests.
    pub fn short(&self) -> &str {
        &self.0[7..17]
    }

    /// The whole text, `sha256:…`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Digest {
    type Err = DigestError;

    fn from_str(text: &str) -> Result<Self, DigestError> {
        let valid = text.strip_prefix("sha256:").is_some_and(|hex| {
            hex.len() == 64
                && hex
                    .bytes()
                    .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        });
        if valid {
            Ok(Self(text.to_owned()))
        } else {
            Err(DigestError(text.chars().take(100).collect()))
        }
    }
}

impl TryFrom<String> for Digest {
    type Error = DigestError;

    fn try_from(text: String) -> Result<Self, DigestError> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(feature = "kube")]
impl schemars::JsonSchema for Digest {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Digest".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"type": "string", "pattern": "^sha256:[0-9a-f]{64}$"})
    }

    fn inline_schema() -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_the_sha256_of_the_bytes() {
        assert_eq!(
            Digest::of_bytes(b"abc").as_str(),
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn the_digest_of_json_does_not_depend_on_the_order_of_keys() {
        let one: serde_json::Value =
            serde_json::from_str(r#"{"b": 1, "a": {"d": 2, "c": 3}}"#).unwrap();
        let two: serde_json::Value =
            serde_json::from_str(r#"{"a": {"c": 3, "d": 2}, "b": 1}"#).unwrap();
        assert_eq!(
            Digest::of_json(&one).unwrap(),
            Digest::of_json(&two).unwrap()
        );
    }

    #[test]
    fn only_a_whole_lower_case_sha256_is_a_digest() {
        for text in [
            "",
            "sha256:",
            "sha256:abc",
            "md5:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            "sha256:BA7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        ] {
            assert!(text.parse::<Digest>().is_err(), "{text}");
        }
    }
}
