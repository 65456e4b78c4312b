//! `offshoot dump log`: all items of the log trees, each log under its subvolume.

use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::{Key, TreeId};

use super::items::ItemOrigin;
use super::tree::write_item;
use crate::args::InfoArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::Console;
use crate::session::Session;

pub(super) fn run(
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let session = Session::open_stored(&arguments.volume, console)?;
    let sector_size = session.volume.superblock().sector_size;
    let source = ItemOrigin { tree: TreeId::TREE_LOG, sector_size };
    for log in session.volume.log_trees()? {
        if !arguments.json {
            writeln!(out, "log of subvolume {}", log.subvolume)?;
        }
        let subvolume = Some(log.subvolume.0);
        let mut written = Ok(());
        session.volume.for_each_item(log.root, Key::MIN, |key, data| {
            written = write_item(out, source, subvolume, key, data, arguments.json);
            if written.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        written.map_err(VerbFailure::Output)?;
    }
    Ok(())
}
