//! The head of a GGUF file: metadata, and where each tensor lies.
//!
//! ```text
//! "GGUF"  version u32 (2 or 3)  tensors u64  fields u64
//! fields:   key (u64 length, bytes)  type u32  value; an array is type u32, length u64, values
//! tensors:  name  dimensions u32  size u64 each, the fastest first  kind u32  offset u64 from the data's start
//! padding to general.alignment (32), then the data
//! ```
//!
//! Nothing is allocated by a number that the file only claims: arrays stay where they are, and their length is checked against the bytes left.

use std::collections::BTreeMap;
use std::ops::Range;

use super::blocks::Kind;

const MAGIC: &[u8; 4] = b"GGUF";
/// Real files have below 100 fields and below 2,000 tensors; the bounds keep what a file makes us hold near its size.
const MAX_FIELDS: u64 = 2_048;
const MAX_TENSORS: u64 = 16_384;
const MAX_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;

/// What a file's head says; ranges are into the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    fields: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Info>,
}

/// A tensor: the dimensions with the slowest first, and where its bytes are.
#[derive(Debug, Clone, PartialEq)]
pub struct Info {
    /// How its numbers are stored.
    pub kind: Kind,
    /// `[rows, columns]` of a matrix.
    pub shape: Vec<usize>,
    /// Its bytes in the file; as many as kind and shape need.
    pub range: Range<usize>,
}

#[derive(Debug, Clone, PartialEq)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Array(Array),
}

/// An array that stays in the file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Array {
    kind: u32,
    len: usize,
    range: Range<usize>,
}

/// The type of an array's values.
const TEXT: u32 = 8;
const ARRAY: u32 = 9;

impl Header {
    /// Reads the head and checks that every tensor lies inside the file.
    ///
    /// # Errors
    /// What is wrong, without the file's name.
    pub fn parse(file: &[u8]) -> Result<Self, String> {
        let mut reader = Reader { file, at: 0 };
        if reader.take(4).ok() != Some(MAGIC.as_slice()) {
            return Err("does not begin with GGUF: it is no GGUF file".into());
        }
        match reader.u32()? {
            2 | 3 => {}
            version if version.swap_bytes() < 256 => {
                return Err("is big-endian: convert it for little-endian machines".into());
            }
            version => {
                return Err(format!(
                    "has version {version}: supported are 2 and 3; convert the model again"
                ));
            }
        }
        let (tensors, fields) = (reader.u64()?, reader.u64()?);
        if tensors > MAX_TENSORS || fields > MAX_FIELDS {
            return Err(format!(
                "has {tensors} tensors and {fields} fields: at most {MAX_TENSORS} and {MAX_FIELDS} are supported"
            ));
        }
        let mut header = Self {
            fields: BTreeMap::new(),
            tensors: BTreeMap::new(),
        };
        for _ in 0..fields {
            let key = reader.text()?;
            let kind = reader.u32()?;
            let value = reader.value(kind)?;
            if header.fields.insert(key.clone(), value).is_some() {
                return Err(format!("has the field {} twice", shown(&key)));
            }
        }
        header.find_tensors(&mut reader, tensors)?;
        Ok(header)
    }

    fn find_tensors(&mut self, reader: &mut Reader<'_>, count: u64) -> Result<(), String> {
        for _ in 0..count {
            let name = reader.text()?;
            let info = reader.info(&name)?;
            if self.tensors.insert(name.clone(), info).is_some() {
                return Err(format!("has the tensor {} twice", shown(&name)));
            }
        }
        let alignment = self
            .unsigned("general.alignment")
            .unwrap_or(DEFAULT_ALIGNMENT);
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(format!("has general.alignment {alignment}"));
        }
        let alignment = usize::try_from(alignment).unwrap_or(1);
        let start = reader.at.next_multiple_of(alignment);
        for (name, info) in &mut self.tensors {
            let range = (start.checked_add(info.range.start))
                .zip(start.checked_add(info.range.end))
                .filter(|(_, end)| *end <= reader.file.len());
            let Some((from, to)) = range else {
                return Err(format!(
                    "ends before the data of tensor {}: the file is truncated, download it again",
                    shown(name)
                ));
            };
            info.range = from..to;
        }
        Ok(())
    }

    /// llama.cpp's name of the model's family.
    pub fn architecture(&self) -> Option<&str> {
        self.text("general.architecture")
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&Info> {
        self.tensors.get(name)
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Info)> {
        self.tensors
            .iter()
            .map(|(name, info)| (name.as_str(), info))
    }

    /// A field that holds text.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        match self.fields.get(key)? {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A field that holds a whole number that is not negative.
    pub(super) fn unsigned(&self, key: &str) -> Option<u64> {
        match self.fields.get(key)? {
            Value::Unsigned(value) => Some(*value),
            Value::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A field that holds a number.
    pub(super) fn float(&self, key: &str) -> Option<f64> {
        match self.fields.get(key)? {
            Value::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// A field that is true or false.
    pub(super) fn bool(&self, key: &str) -> Option<bool> {
        match self.fields.get(key)? {
            Value::Bool(value) => Some(*value),
            _ => None,
        }
    }

    /// A field that holds an array.
    pub(super) fn array(&self, key: &str) -> Option<&Array> {
        match self.fields.get(key)? {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl Array {
    /// How many values it has.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Its texts; none when it holds something else.
    pub(super) fn texts<'a>(&self, file: &'a [u8]) -> impl Iterator<Item = &'a str> {
        let mut reader = Reader {
            file,
            at: self.range.start,
        };
        let len = if self.kind == TEXT { self.len } else { 0 };
        (0..len).map_while(move |_| reader.text_bytes().ok())
    }

    /// Its numbers; none when it holds something else.
    pub(super) fn numbers(&self, file: &[u8]) -> impl Iterator<Item = f64> {
        let mut reader = Reader {
            file,
            at: self.range.start,
        };
        let kind = self.kind;
        let len = if kind == TEXT { 0 } else { self.len };
        (0..len).map_while(move |_| match reader.value(kind).ok()? {
            #[expect(clippy::cast_precision_loss, reason = "types and scores are small")]
            Value::Unsigned(value) => Some(value as f64),
            #[expect(clippy::cast_precision_loss, reason = "types and scores are small")]
            Value::Signed(value) => Some(value as f64),
            Value::Float(value) => Some(value),
            Value::Bool(_) | Value::Text(_) | Value::Array(_) => None,
        })
    }
}

struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let end = self
            .at
            .checked_add(len)
            .filter(|end| *end <= self.file.len());
        let Some(end) = end else {
            return Err("ends inside its header: the file is truncated, download it again".into());
        };
        let bytes = &self.file[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.take(N)?;
        Ok(bytes.try_into().expect("so many bytes were taken"))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.number().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.number().map(u64::from_le_bytes)
    }

    fn len(&mut self) -> Result<usize, String> {
        Ok(usize::try_from(self.u64()?).unwrap_or(usize::MAX))
    }

    fn text_bytes(&mut self) -> Result<&'a str, String> {
        let len = self.len()?;
        std::str::from_utf8(self.take(len)?)
            .map_err(|_| "has a text that is no UTF-8: the file is damaged".into())
    }

    fn text(&mut self) -> Result<String, String> {
        self.text_bytes().map(str::to_owned)
    }

    fn value(&mut self, kind: u32) -> Result<Value, String> {
        Ok(match kind {
            0 => Value::Unsigned(u8::from_le_bytes(self.number()?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.number()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.number()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.number()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.number()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.number()?).into()),
            7 => Value::Bool(self.take(1)? != [0]),
            TEXT => Value::Text(self.text()?),
            ARRAY => Value::Array(self.array()?),
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.number()?)),
            12 => Value::Float(f64::from_le_bytes(self.number()?)),
            other => return Err(format!("has a field of the unknown type {other}")),
        })
    }

    /// Passes over an array, checking each text on the way.
    fn array(&mut self) -> Result<Array, String> {
        let (kind, len) = (self.u32()?, self.len()?);
        let start = self.at;
        match kind {
            TEXT => {
                for _ in 0..len {
                    self.text_bytes()?;
                }
            }
            ARRAY => return Err("has arrays of arrays: no such field is used".into()),
            _ => {
                let size = match kind {
                    0 | 1 | 7 => 1,
                    2 | 3 => 2,
                    4..=6 => 4,
                    10..=12 => 8,
                    other => return Err(format!("has an array of the unknown type {other}")),
                };
                self.take(len.saturating_mul(size))?;
            }
        }
        Ok(Array {
            kind,
            len,
            range: start..self.at,
        })
    }

    /// A tensor, its range from the data's start.
    fn info(&mut self, name: &str) -> Result<Info, String> {
        let dimensions = self.u32()?;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS {
            return Err(format!(
                "has the tensor {} with {dimensions} dimensions: 1 to {MAX_DIMENSIONS} are possible",
                shown(name)
            ));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            shape.push(self.len()?);
        }
        shape.reverse();
        let kind = Kind::of(self.u32()?).map_err(|kind| {
            format!(
                "has the tensor {} in {kind}, which is not supported: supported are {}; quantise it to one of them",
                shown(name),
                Kind::SUPPORTED
            )
        })?;
        let start = self.len()?;
        let range = kind
            .bytes(&shape)
            .and_then(|bytes| Some(start..start.checked_add(bytes)?));
        let Some(range) = range else {
            return Err(format!(
                "has the tensor {} with a shape that its type cannot have: the file is damaged",
                shown(name)
            ));
        };
        Ok(Info { kind, shape, range })
    }
}

/// A name of the file, fit for one line of an error.
fn shown(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(version: u32, tensors: u64, fields: u64) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend(version.to_le_bytes());
        file.extend(tensors.to_le_bytes());
        file.extend(fields.to_le_bytes());
        file
    }

    #[test]
    fn files_that_are_not_gguf_say_what_they_are_instead() {
        for (file, expected) in [
            (b"PK\x03\x04".to_vec(), "does not begin with GGUF"),
            (head(1, 0, 0), "has version 1: supported are 2 and 3"),
            (head(3_u32.swap_bytes(), 0, 0), "is big-endian"),
            (head(3, u64::MAX, 0), "has 18446744073709551615 tensors"),
            (head(3, 1, 0), "ends inside its header"),
        ] {
            let error = Header::parse(&file).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn claimed_lengths_are_checked_before_anything_is_held() {
        let mut file = head(3, 0, 1);
        file.extend(1_u64.to_le_bytes());
        file.push(b'a');
        file.extend(ARRAY.to_le_bytes());
        file.extend(10_u32.to_le_bytes());
        file.extend(u64::MAX.to_le_bytes());
        assert!(Header::parse(&file).unwrap_err().contains("ends inside"));
    }
}
