//! `offshoot dump`: structures of the format, decoded.
//!
//! Each structure is decoded once, into [`fields::Fields`], and printed either as lines or as JSON.

mod chunks;
mod fields;
mod items;
mod log;
mod superblock;
mod tree;

use std::io::Write;
use std::sync::Arc;

use crate::args::DumpVerb;
use crate::exit::Result;
use crate::output::Console;

pub(in crate::verbs) fn run(
    verb: &DumpVerb,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    match verb {
        DumpVerb::Super(arguments) => superblock::run(arguments, out, console),
        DumpVerb::Chunks(arguments) => chunks::run(arguments, out, console),
        DumpVerb::Log(arguments) => log::run(arguments, out, console),
        DumpVerb::Tree(arguments) => tree::run(arguments, out, console),
    }
}
