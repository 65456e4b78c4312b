//! `offshoot dump super`: every superblock of the given devices, field by field.
//!
//! Each superblock is read by itself, and shown with whether it verifies. This verb is for volumes
//! that cannot be opened, so it opens none.

use std::io::Write;

use offshoot_btrfs_format::chunk::{DevItem, parse_system_chunks};
use offshoot_btrfs_format::csum::{Checksum, ChecksumType};
use offshoot_btrfs_format::superblock::{
    CompatRo, Incompat, MAGIC, RootBackup, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock,
    SuperblockItem,
};
use offshoot_device::BlockDevice;
use offshoot_vfs::OsReason;
use serde::Serialize;

use super::chunks;
use crate::args::InfoArguments;
use crate::disk::MemberDisk;
use crate::exit::{ExitStatus, Result, VerbFailure};
use crate::output::{Console, Escaped, JsonArray};
use crate::session::Access;
use crate::verbs::fields::{Fields, Value};

/// The superblock, or other bytes, at one of the offsets where a superblock belongs.
#[derive(Serialize)]
struct FoundSuperblock {
    device: String,
    offset: u64,
    /// Why it is not a valid superblock.
    problem: Option<String>,
    superblock: Option<Fields>,
    #[serde(skip)]
    kind: SuperblockBytes,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum SuperblockBytes {
    Verified,
    Damaged,
    Absent,
}

pub(super) fn run(arguments: &InfoArguments, out: &mut dyn Write, console: &Console) -> Result {
    let mut found = Vec::new();
    let volume = &arguments.volume;
    let (first, others) = (&volume.open.layers, volume.open.layers.of_further_device());
    let others = volume.open.devices.iter().map(|path| (path, &others));
    for (path, layers) in std::iter::once((&volume.volume, first)).chain(others) {
        let disk = MemberDisk::open(path, Access::Read, layers, false)?;
        disk.warnings.iter().for_each(|what| console.warning(what));
        let device = disk.device;
        let offsets = SUPERBLOCK_OFFSETS.into_iter().enumerate().filter(|(at, offset)| {
            // The primary must be there. A copy must be there if the device is large enough for it.
            *at == 0 || offset + SUPERBLOCK_SIZE as u64 <= device.size_bytes()
        });
        found.extend(offsets.map(|(_, offset)| FoundSuperblock::read(&*device, offset)));
    }
    if arguments.json {
        let mut array = JsonArray::new(&mut *out)?;
        found.iter().try_for_each(|found| array.push(found))?;
        array.finish()?;
    } else {
        for (at, found) in found.iter().enumerate() {
            if at > 0 {
                writeln!(out)?;
            }
            found.print(out)?;
        }
    }
    result(&found, console)
}

/// Fails if a device has no superblock that verifies. A single bad copy is not a failure: showing
/// it is the purpose of this verb.
fn result(found: &[FoundSuperblock], console: &Console) -> Result {
    let mut status = None;
    for group in found.chunk_by(|a, b| a.device == b.device) {
        if group.iter().any(|found| found.kind == SuperblockBytes::Verified) {
            continue;
        }
        let device = Escaped(group[0].device.as_bytes());
        let is_absent = group.iter().all(|found| found.kind == SuperblockBytes::Absent);
        if is_absent {
            console.error(&format_args!("{device}: no btrfs superblock"));
        } else {
            console.error(&format_args!("{device}: no superblock verifies"));
        }
        status = status.max(Some(if is_absent { ExitStatus::Failed } else { ExitStatus::Corrupt }));
    }
    status.map_or(Ok(()), |status| Err(VerbFailure::Reported(status)))
}

impl FoundSuperblock {
    fn read(device: &dyn BlockDevice, offset: u64) -> Self {
        let name = device.name().to_owned();
        let mut bytes = [0; SUPERBLOCK_SIZE];
        let absent = |problem| Self {
            device: name.clone(),
            offset,
            problem: Some(problem),
            superblock: None,
            kind: SuperblockBytes::Absent,
        };
        if let Err(error) = device.read_at(offset, &mut bytes) {
            return absent(format!("cannot be read: {}", OsReason(&error)));
        }
        let item = match SuperblockItem::view(&bytes) {
            Ok(item) if item.magic == MAGIC => item,
            Ok(_) => return absent("no btrfs magic".to_owned()),
            Err(malformed) => return absent(malformed.problem.into_owned()),
        };
        // Unsupported features are no problem here.
        let problem = Superblock::parse(&bytes, offset).err();
        let problem = problem.map(|malformed| malformed.problem.into_owned());
        let kind =
            if problem.is_some() { SuperblockBytes::Damaged } else { SuperblockBytes::Verified };
        Self { device: name, offset, problem, superblock: Some(fields(item)), kind }
    }

    fn print(&self, out: &mut dyn Write) -> Result {
        write!(out, "superblock at {} of {}: ", self.offset, Escaped(self.device.as_bytes()))?;
        match (self.kind, &self.problem) {
            (SuperblockBytes::Verified, _) | (_, None) => writeln!(out, "verifies")?,
            (SuperblockBytes::Damaged, Some(problem)) => {
                writeln!(out, "does NOT verify: {problem}")?;
            }
            (SuperblockBytes::Absent, Some(problem)) => writeln!(out, "{problem}")?,
        }
        self.superblock.iter().try_for_each(|fields| fields.print_lines(out))?;
        Ok(())
    }
}

/// The fields as they are stored, without checks.
fn fields(item: &SuperblockItem) -> Fields {
    let (csum_type, csum_len) = match ChecksumType::from_disk(item.csum_type.get()) {
        Some(checksum) => (checksum.name().to_owned(), checksum.len()),
        None => (format!("unknown type {}", item.csum_type), item.csum.len()),
    };
    Fields::default()
        .with("csum_type", csum_type)
        .with("csum", Checksum::stored(&item.csum[..csum_len]).to_string())
        .uuid("fsid", item.fsid)
        .uuid("metadata_uuid", item.metadata_uuid)
        .with("bytenr", item.bytenr)
        .with("flags", item.flags)
        .with("generation", item.generation)
        .with("root", item.root)
        .with("root_level", item.root_level)
        .with("chunk_root", item.chunk_root)
        .with("chunk_root_generation", item.chunk_root_generation)
        .with("chunk_root_level", item.chunk_root_level)
        .with("log_root", item.log_root)
        .with("log_root_transid", item.log_root_transid)
        .with("log_root_level", item.log_root_level)
        .with("total_bytes", item.total_bytes)
        .with("bytes_used", item.bytes_used)
        .with("root_dir_objectid", item.root_dir_objectid)
        .with("num_devices", item.num_devices)
        .with("sectorsize", item.sectorsize)
        .with("nodesize", item.nodesize)
        .with("leafsize", item.leafsize)
        .with("stripesize", item.stripesize)
        .with("compat_flags", item.compat_flags)
        .with("compat_ro_flags", CompatRo(item.compat_ro_flags.get()).names())
        .with("incompat_flags", Incompat(item.incompat_flags.get()).names())
        .name("label", item.label())
        .with("cache_generation", item.cache_generation)
        .with("uuid_tree_generation", item.uuid_tree_generation)
        .with("nr_global_roots", item.nr_global_roots)
        .with("dev_item", device(&item.dev_item))
        .with("sys_chunk_array_size", item.sys_chunk_array_size)
        .with("sys_chunk_array", system_chunks(item))
        .with("super_roots", item.super_roots.iter().map(backup).collect::<Vec<_>>())
}

fn system_chunks(item: &SuperblockItem) -> Value {
    let sector_size = item.sectorsize.get();
    if !sector_size.is_power_of_two() {
        return Value::from(format!("malformed: sectors of {sector_size} bytes"));
    }
    let len = usize::try_from(item.sys_chunk_array_size.get()).unwrap_or(usize::MAX);
    let Some(array) = item.sys_chunk_array.get(..len) else {
        return Value::from(format!("malformed: an array of {len} bytes"));
    };
    match parse_system_chunks(array, sector_size) {
        Ok(chunks) => chunks.iter().map(chunks::fields).collect::<Vec<_>>().into(),
        Err(malformed) => Value::from(format!("malformed: {malformed}")),
    }
}

/// A device item.
pub(super) fn device(item: &DevItem) -> Fields {
    Fields::default()
        .with("devid", item.devid)
        .with("total_bytes", item.total_bytes)
        .with("bytes_used", item.bytes_used)
        .with("io_align", item.io_align)
        .with("io_width", item.io_width)
        .with("sector_size", item.sector_size)
        .with("type", item.dev_type)
        .with("generation", item.generation)
        .with("start_offset", item.start_offset)
        .with("dev_group", item.dev_group)
        .with("seek_speed", item.seek_speed)
        .with("bandwidth", item.bandwidth)
        .uuid("uuid", item.uuid)
        .uuid("fsid", item.fsid)
}

fn backup(backup: &RootBackup) -> Fields {
    let root = |bytenr, generation, level: u8| {
        Fields::default()
            .with("bytenr", Value::from(bytenr))
            .with("generation", Value::from(generation))
            .with("level", level)
    };
    Fields::default()
        .with("tree_root", root(backup.tree_root, backup.tree_root_gen, backup.tree_root_level))
        .with("chunk_root", root(backup.chunk_root, backup.chunk_root_gen, backup.chunk_root_level))
        .with(
            "extent_root",
            root(backup.extent_root, backup.extent_root_gen, backup.extent_root_level),
        )
        .with("fs_root", root(backup.fs_root, backup.fs_root_gen, backup.fs_root_level))
        .with("dev_root", root(backup.dev_root, backup.dev_root_gen, backup.dev_root_level))
        .with("csum_root", root(backup.csum_root, backup.csum_root_gen, backup.csum_root_level))
        .with("total_bytes", backup.total_bytes)
        .with("bytes_used", backup.bytes_used)
        .with("num_devices", backup.num_devices)
}
