//! Damage: bytes of a file changed in the ways that break parsers. A seed makes the same damage on every machine.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Numbers at the ends of their types.
const EXTREMES: [u64; 10] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 40,
    u64::MAX >> 1,
    u64::MAX - 7,
    u64::MAX,
];

/// Numbers as JSON writes them, and other values in their place.
const JSON: [&str; 12] = [
    "0",
    "-1",
    "1e999",
    "18446744073709551615",
    "4294967296",
    "0.5",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "\"re:(a+)+b\"",
];

/// A damaged copy of `seed`.
pub(crate) fn damage(seed: &[u8], number: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(number);
    let mut file = seed.to_vec();
    for _ in 0..random.random_range(1..=4) {
        if file.is_empty() {
            return file;
        }
        // Heads are where files say what they are: half of all damage is done there.
        let end = if random.random() {
            file.len()
        } else {
            file.len().min(2_048)
        };
        let at = random.random_range(0..end);
        match random.random_range(0..8) {
            0 => file[at] ^= 1 << random.random_range(0..8),
            1 => file[at] = random.random(),
            2 => {
                let extreme = EXTREMES[random.random_range(0..EXTREMES.len())].to_le_bytes();
                let len = [1, 2, 4, 8][random.random_range(0..4)].min(file.len() - at);
                file[at..at + len].copy_from_slice(&extreme[..len]);
            }
            3 => file.truncate(at),
            4 => {
                let part = part(&mut random, &file, at);
                file.splice(at..at, part);
            }
            5 => {
                let len = part(&mut random, &file, at).len();
                file.drain(at..at + len);
            }
            6 => {
                let (from, len) = (random.random_range(0..file.len()), file.len());
                let part = part(&mut random, &file, from);
                let fits = part.len().min(len - at);
                file[at..at + fits].copy_from_slice(&part[..fits]);
            }
            _ => replace_value(&mut random, &mut file, at),
        }
    }
    file
}

/// Some bytes from `at` on.
fn part(random: &mut StdRng, file: &[u8], at: usize) -> Vec<u8> {
    let len = random.random_range(1..=64).min(file.len() - at);
    file[at..at + len].to_vec()
}

/// Puts another value in place of the next number or word of a JSON text.
fn replace_value(random: &mut StdRng, file: &mut Vec<u8>, at: usize) {
    let is_value = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'"');
    let Some(start) = file[at..].iter().position(is_value).map(|start| at + start) else {
        return;
    };
    let rest = &file[start..];
    let len = rest
        .iter()
        .position(|byte| !is_value(byte))
        .unwrap_or(rest.len());
    let value = JSON[random.random_range(0..JSON.len())].bytes();
    file.splice(start..start + len, value);
}
