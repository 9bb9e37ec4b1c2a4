//! The commands: each file reads its arguments, calls the library and prints; it decides nothing.

pub mod advise;
pub mod bench;
pub mod calibrate;
pub mod export;
pub mod fetch;
pub mod inspect;
pub mod quality;
pub mod quantiser;
pub mod serve;
pub mod valve;
pub mod verify;
