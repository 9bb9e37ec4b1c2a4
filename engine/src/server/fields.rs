//! A JSON object taken apart field by field, so that every refusal names its field and nothing is ignored in silence.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::ApiError;

/// The fields that nobody has asked for yet.
#[derive(Debug)]
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// The object in a request's body.
    ///
    /// # Errors
    /// Bytes that are no JSON object; nesting is limited to 128.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::request("the body must be a JSON object")),
            Err(error) => Err(ApiError::request(format!("the body is not JSON: {error}"))),
        }
    }

    /// An object inside a request; `name` is its own place.
    ///
    /// # Errors
    /// When the value is no object.
    pub(super) fn of(value: Value, name: &str) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self(fields)),
            _ => Err(ApiError::field(name, format!("`{name}` must be an object"))),
        }
    }

    /// The field's value; `null` counts as absent.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    /// A text.
    ///
    /// # Errors
    /// Another type.
    pub(super) fn string(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(ApiError::field(name, format!("`{name}` must be a string"))),
        }
    }

    /// A truth value, false when absent.
    ///
    /// # Errors
    /// Another type.
    pub(super) fn boolean(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.take(name) {
            None => Ok(false),
            Some(Value::Bool(value)) => Ok(value),
            Some(_) => Err(ApiError::field(
                name,
                format!("`{name}` must be true or false"),
            )),
        }
    }

    /// A whole number in a range.
    ///
    /// # Errors
    /// Another type or a number outside.
    pub(super) fn integer(
        &mut self,
        name: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        (value.as_u64())
            .and_then(|number| usize::try_from(number).ok())
            .filter(|number| range.contains(number))
            .map(Some)
            .ok_or_else(|| {
                let (first, last) = (range.start(), range.end());
                ApiError::field(
                    name,
                    format!("`{name}` must be a whole number from {first} to {last}"),
                )
            })
    }

    /// A number in a range.
    ///
    /// # Errors
    /// Another type or a number outside.
    pub(super) fn number(
        &mut self,
        name: &str,
        range: RangeInclusive<f32>,
        default: f32,
    ) -> Result<f32, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(default);
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the range is checked behind it, and 7 digits are enough"
        )]
        (value.as_f64())
            .map(|number| number as f32)
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let (first, last) = (range.start(), range.end());
                ApiError::field(
                    name,
                    format!("`{name}` must be a number from {first} to {last}"),
                )
            })
    }

    /// Takes fields that have no effect whatever they say.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.0.remove(*name);
        }
    }

    /// Takes fields that this engine cannot honour: each may only have a value that asks for nothing.
    ///
    /// # Errors
    /// The first field that asks for something.
    pub(super) fn neutral(&mut self, fields: &[(&str, &[Value])]) -> Result<(), ApiError> {
        for (name, neutral) in fields {
            if let Some(value) = self.take(name)
                && !neutral.iter().any(|allowed| same(allowed, &value))
            {
                return Err(ApiError::field(
                    *name,
                    format!("`{name}` is not supported: leave it out"),
                ));
            }
        }
        Ok(())
    }

    /// The end: nothing may be left.
    ///
    /// # Errors
    /// The first field that nobody knows. `inside` is the object's own place, empty for the request itself.
    pub(super) fn finish(self, inside: &str) -> Result<(), ApiError> {
        match self.0.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(100).collect();
                let place = if inside.is_empty() {
                    name
                } else {
                    format!("{inside}.{name}")
                };
                Err(ApiError::field(
                    place.clone(),
                    format!("`{place}` is not supported: leave it out"),
                ))
            }
        }
    }
}

/// Equal values, where 1 and 1.0 are one number.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}
