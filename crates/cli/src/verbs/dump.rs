//! `offshoot dump`: structures of the format, decoded.
//!
//! Each structure is decoded once, into [`Fields`](super::fields::Fields), and printed either as
//! lines or as JSON.

use std::io::Write;
use std::sync::Arc;

use offshoot_device::{BlockDevice, VolumeFormat};
use offshoot_vfs::{Code, Error};

use super::xfs::dump::DumpOutput;
use super::{btrfs, xfs};
use crate::args::{DumpInodeArguments, DumpTreeArguments, DumpVerb, VolumeArguments};
use crate::disk::MemberDisk;
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, Escaped};
use crate::session::{Access, only_in_btrfs};

pub(super) fn run(verb: &DumpVerb, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let (volume, is_json) = match verb {
        DumpVerb::Super(arguments) | DumpVerb::Groups(arguments) | DumpVerb::Log(arguments) => {
            (&arguments.volume, arguments.json)
        }
        DumpVerb::Inode(arguments) => (&arguments.volume, arguments.json),
        DumpVerb::Tree(arguments) => {
            // A name that neither format has is wrong, whatever is on the disk.
            let tree = &arguments.tree;
            if !xfs::dump::is_tree(tree) && btrfs::dump::tree_id(tree).is_err() {
                return Err(VerbFailure::Usage(format!(
                    "no tree is called {}; {}; {}",
                    Escaped(tree.as_bytes()),
                    btrfs::dump::tree_names(),
                    xfs::dump::tree_names()
                )));
            }
            (&arguments.volume, arguments.json)
        }
        DumpVerb::Chunks(_) => return btrfs::dump::run(verb, out, console),
    };
    let Some(device) = xfs_on(volume, Access::Read, console)? else {
        return btrfs::dump::run(verb, out, console);
    };
    let to = DumpOutput { out, console, is_json };
    match verb {
        DumpVerb::Groups(_) => xfs::dump::headers(&device, to),
        DumpVerb::Inode(DumpInodeArguments { number, .. }) => {
            xfs::dump::inode(&device, *number, to)
        }
        DumpVerb::Tree(DumpTreeArguments { tree, .. }) => xfs::dump::tree(&device, tree, to),
        DumpVerb::Log(_) => xfs::dump::log(&device, to),
        _ => xfs::dump::superblocks(&device, to),
    }
}

/// The device of the volume if it holds XFS.
pub(super) fn xfs_on(
    arguments: &VolumeArguments,
    access: Access,
    console: &Console,
) -> Result<Option<Arc<dyn BlockDevice>>> {
    let disk = MemberDisk::open(&arguments.volume, access, &arguments.open.layers, false)?;
    let name = disk.device.name();
    if VolumeFormat::on(&*disk.device) == VolumeFormat::Btrfs {
        return Ok(None);
    }
    if !arguments.open.devices.is_empty() {
        return Err(VerbFailure::Inside(name.into(), only_in_btrfs("a further device")));
    }
    disk.warnings.iter().for_each(|what| console.warning(what));
    Ok(Some(disk.device))
}

/// The error about a structure that a btrfs volume does not have.
pub(super) fn only_in_xfs() -> VerbFailure {
    let what = "this structure on a btrfs volume: that is for XFS alone, and of btrfs there are \
                super, chunks, tree and log";
    Error::unsupported(Code::NotInFormat, what).into()
}
