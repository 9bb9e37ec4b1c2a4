//! The two scalar forms of the custom resource: decimals and spans of time, written as text and checked by pattern.
//!
//! Floats are avoided in Kubernetes APIs (they do not survive every client unchanged), hence text.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// A decimal number of at most four digits before and six after the point, such as `"0.95"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decimal(pub String);

impl Decimal {
    /// The number. The schema's pattern guarantees that it parses; text that went around the schema gives `None`.
    pub fn value(&self) -> Option<f64> {
        let plain = self
            .0
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.');
        self.0.parse().ok().filter(|_| plain)
    }
}

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl JsonSchema for Decimal {
    fn schema_name() -> Cow<'static, str> {
        "Decimal".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": r"^[0-9]{1,4}(\.[0-9]{1,6})?$"})
    }

    fn inline_schema() -> bool {
        true
    }
}

/// A span of time in whole seconds, minutes or hours, such as `60s`, `5m` or `1h`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span(pub String);

impl Span {
    /// The span in seconds; `None` for text that went around the schema.
    pub fn seconds(&self) -> Option<u32> {
        let (number, unit) = self.0.split_at_checked(self.0.len().checked_sub(1)?)?;
        let factor = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3600,
            _ => return None,
        };
        number.parse::<u32>().ok()?.checked_mul(factor)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl JsonSchema for Span {
    fn schema_name() -> Cow<'static, str> {
        "Span".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "pattern": "^[0-9]{1,5}[smh]$"})
    }

    fn inline_schema() -> bool {
        true
    }
}

/// From which prompt length on the quantised prefill is used: a number of tokens, or `Auto` for the break-even that calibration measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PromptThreshold {
    /// So many tokens.
    Tokens(i32),
    /// Measured.
    Measured(Auto),
}

/// The word `Auto`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Auto {
    /// Itself.
    Auto,
}

impl JsonSchema for PromptThreshold {
    fn schema_name() -> Cow<'static, str> {
        "PromptThreshold".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"x-kubernetes-int-or-string": true})
    }

    fn inline_schema() -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read_in_their_unit() {
        let seconds = |text: &str| Span(text.into()).seconds();
        assert_eq!(seconds("60s"), Some(60));
        assert_eq!(seconds("5m"), Some(300));
        assert_eq!(seconds("2h"), Some(7200));
    }

    #[test]
    fn what_is_no_span_has_no_seconds() {
        for text in ["", "s", "5", "5d", "-5s", "5 s", "99999999999h", "5µ"] {
            assert_eq!(Span(text.into()).seconds(), None, "{text}");
        }
    }

    #[test]
    fn a_threshold_is_a_number_or_the_word_auto() {
        let read = |text: &str| serde_json::from_str::<PromptThreshold>(text).ok();
        assert_eq!(read("512"), Some(PromptThreshold::Tokens(512)));
        let auto = PromptThreshold::Measured(Auto::Auto);
        assert_eq!(read("\"Auto\""), Some(auto));
        assert_eq!(serde_json::to_string(&auto).unwrap(), "\"Auto\"");
        for wrong in ["\"512\"", "\"auto\"", "1.5", "null", "99999999999"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_plain_decimals_have_a_value() {
        assert_eq!(Decimal("0.95".into()).value(), Some(0.95));
        for text in ["", "NaN", "inf", "-1", "1e9", "+1", "0x1"] {
            assert_eq!(Decimal(text.into()).value(), None, "{text}");
        }
    }
}
