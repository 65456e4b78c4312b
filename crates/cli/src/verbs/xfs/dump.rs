//! `offshoot dump` for XFS: superblocks, headers of groups, trees, inodes and the log, decoded.
//!
//! Each structure is read by itself, and shown with whether it verifies. Of a volume that does not
//! open only the superblock of the first group is found.

mod fields;
mod log;
mod tree;

use std::io::Write;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_vfs::{Errno, Error, OsReason};
use offshoot_xfs::{XfsOptions, XfsVolume};
use offshoot_xfs_format::group::{Agf, Agfl, Agi};
use offshoot_xfs_format::inode::XfsInode;
use offshoot_xfs_format::superblock::{MOST_SECTOR_BYTES, XfsSuperblock};
use offshoot_xfs_format::{AgBlock, AgNumber, Ino, Malformed, XfsGeometry};
use serde::Serialize;

use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, JsonArray, write_line};
use crate::verbs::fields::Fields;

pub(in crate::verbs) use log::run as log;
pub(in crate::verbs) use tree::{is_tree, run as tree, tree_names};

/// Where and how structures are shown.
pub(in crate::verbs) struct DumpOutput<'a> {
    pub(in crate::verbs) out: &'a mut dyn Write,
    pub(in crate::verbs) console: &'a Console,
    pub(in crate::verbs) is_json: bool,
}

impl DumpOutput<'_> {
    /// Writes a line: in JSON, an object with one field.
    fn line(&mut self, what: &'static str, fields: Fields) -> Result {
        if self.is_json {
            return Ok(write_line(self.out, &Fields::default().with(what, fields))?);
        }
        writeln!(self.out, "{what:<12} {fields}").map_err(VerbFailure::Output)
    }
}

/// A structure, or the bytes where it belongs.
#[derive(Serialize)]
struct FoundStructure {
    structure: String,
    offset: u64,
    /// Why it does not verify.
    problem: Option<String>,
    /// Absent if it cannot be read.
    fields: Option<Fields>,
}

/// Opens the volume on `device`, whatever its log holds.
fn open(device: &Arc<dyn BlockDevice>) -> Result<Arc<XfsVolume>> {
    let options = XfsOptions { is_log_ignored: true, ..XfsOptions::default() };
    let volume = XfsVolume::open(device.clone(), &options);
    volume.map_err(|error| VerbFailure::Inside(device.name().into(), error))
}

impl FoundStructure {
    /// Reads the structure of `len` bytes at `offset`, and decodes it.
    fn read(
        device: &dyn BlockDevice,
        (structure, offset, len): (String, u64, usize),
        decode: impl FnOnce(&[u8]) -> (Option<Fields>, Option<Malformed>),
    ) -> Self {
        let mut bytes = vec![0; len];
        if let Err(error) = device.read_at(offset, &mut bytes) {
            let problem = Some(format!("cannot be read: {}", OsReason(&error)));
            return Self { structure, offset, problem, fields: None };
        }
        let (fields, problem) = decode(&bytes);
        let problem = problem.map(|malformed| malformed.problem.into_owned());
        Self { structure, offset, problem, fields }
    }

    fn print(&self, out: &mut dyn Write) -> Result {
        write!(out, "{} at {}: ", self.structure, self.offset)?;
        match &self.problem {
            None => writeln!(out, "verifies")?,
            Some(problem) => writeln!(out, "does NOT verify: {}", Escaped(problem.as_bytes()))?,
        }
        match &self.fields {
            Some(fields) => Ok(fields.print_lines(out)?),
            None => Ok(()),
        }
    }
}

/// Shows structures. Fails if none verifies: showing single bad ones is the purpose of the verb.
fn show(all: impl Iterator<Item = FoundStructure>, to: DumpOutput<'_>) -> Result {
    let DumpOutput { out, console, is_json } = to;
    let mut has_sound = false;
    if is_json {
        let mut array = JsonArray::new(out)?;
        for found in all {
            has_sound |= found.problem.is_none();
            array.push(&found)?;
        }
        array.finish()?;
    } else {
        for (at, found) in all.enumerate() {
            has_sound |= found.problem.is_none();
            if at > 0 {
                writeln!(out)?;
            }
            found.print(out)?;
        }
    }
    if has_sound {
        return Ok(());
    }
    console.error(&"nothing of it verifies");
    Err(VerbFailure::Reported(ExitStatus::Corrupt))
}

/// The groups that begin on `device`, and where. A hostile volume may say that it has more.
fn groups<'a>(
    device: &'a dyn BlockDevice,
    geometry: &'a XfsGeometry,
) -> impl Iterator<Item = (AgNumber, u64)> + 'a {
    (0..geometry.ag_count)
        .map(|ag| (AgNumber(ag), geometry.place(AgNumber(ag), AgBlock(0)).bytes()))
        .take_while(|(_, start)| *start < device.size_bytes())
}

/// Shows the superblocks of all groups.
pub(in crate::verbs) fn superblocks(device: &Arc<dyn BlockDevice>, to: DumpOutput<'_>) -> Result {
    let superblock = |(ag, offset), len| {
        let place = (format!("superblock of group {ag}"), offset, len);
        FoundStructure::read(&**device, place, |bytes| {
            (fields::superblock(bytes), XfsSuperblock::parse(bytes).err())
        })
    };
    match open(device) {
        Ok(volume) => {
            let geometry = &volume.superblock().geometry;
            let all = groups(&**device, geometry);
            show(all.map(|at| superblock(at, geometry.sector_size())), to)
        }
        Err(failure) => {
            to.console.warning(&format_args!("only the first group is looked at: {failure}"));
            let len = device.size_bytes().min(MOST_SECTOR_BYTES);
            let first = superblock((AgNumber(0), 0), usize::try_from(len).unwrap_or(0));
            show(std::iter::once(first), to)
        }
    }
}

/// Shows the headers of all groups: AGF, AGI and AGFL.
pub(in crate::verbs) fn headers(device: &Arc<dyn BlockDevice>, to: DumpOutput<'_>) -> Result {
    let volume = open(device)?;
    let geometry = &volume.superblock().geometry;
    let of_group = |(ag, _)| {
        let at =
            |name: &str, offset| (format!("{name} of group {ag}"), offset, geometry.sector_size());
        let mut kept = None;
        let place = at("AGF", Agf::offset(geometry, ag));
        let space = FoundStructure::read(&**device, place, |bytes| {
            kept = Agf::view(bytes).ok().copied();
            (kept.as_ref().map(fields::agf), Agf::parse(bytes, geometry, ag).err())
        });
        let place = at("AGI", Agi::offset(geometry, ag));
        let inodes = FoundStructure::read(&**device, place, |bytes| {
            (Agi::view(bytes).ok().map(fields::agi), Agi::parse(bytes, geometry, ag).err())
        });
        let place = at("AGFL", Agfl::offset(geometry, ag));
        let list = FoundStructure::read(&**device, place, |bytes| {
            let ring = Agfl::parse(bytes, geometry, ag).and_then(|list| match &kept {
                Some(agf) => list.ring(agf, geometry, ag),
                None => Ok(list.blocks),
            });
            match ring {
                Ok(blocks) => (Some(fields::agfl(&blocks)), None),
                Err(problem) => (None, Some(problem)),
            }
        });
        [space, inodes, list]
    };
    show(groups(&**device, geometry).flat_map(of_group), to)
}

/// Shows the inode with this number, and the extents in it.
pub(in crate::verbs) fn inode(
    device: &Arc<dyn BlockDevice>,
    number: u64,
    to: DumpOutput<'_>,
) -> Result {
    let volume = open(device)?;
    let geometry = &volume.superblock().geometry;
    let ino = Ino(number);
    let offset = geometry.inode_offset(ino);
    let offset = offset.ok_or_else(|| Error::posix(Errno::NOENT, format!("inode {ino}")))?;
    let place = (format!("inode {ino}"), offset, geometry.inode_size());
    let found = FoundStructure::read(&**device, place, |bytes| {
        match XfsInode::verify(bytes, geometry, ino) {
            Ok(inode) => (fields::inode(bytes, &inode), None),
            Err(problem) => (fields::core(bytes), Some(problem)),
        }
    });
    show(std::iter::once(found), to)
}
