//! `offshoot dump` for btrfs.

mod chunks;
mod items;
mod log;
mod superblock;
mod tree;

use std::io::Write;
use std::sync::Arc;

use crate::args::DumpVerb;
use crate::exit::Result;
use crate::output::Console;
use crate::verbs::dump::only_in_xfs;
pub(in crate::verbs) use tree::{tree_id, tree_names};

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
        DumpVerb::Groups(_) | DumpVerb::Inode(_) => Err(only_in_xfs()),
    }
}
