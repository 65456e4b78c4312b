//! What users and programs see: escaped names, sizes, times, JSON, and the only code that writes to
//! standard error.

mod console;
mod human;
mod json;
mod mode;
mod name;
mod owners;
mod progress;
mod record;
mod time;

pub(crate) use console::{Console, Done, words};
pub(crate) use human::{human_size, short_size};
pub(crate) use json::{JsonArray, write_line};
pub(crate) use mode::{ModeLetters, type_words};
pub(crate) use name::{is_terminal, shown_name, write_name};
pub(crate) use offshoot_vfs::escape::{Escaped, json_name, message};
pub(crate) use owners::OwnerNames;
pub(crate) use progress::ProgressLine;
pub(crate) use record::{FileRecord, shown_inode};
pub(crate) use time::{CivilTime, zone};
