//! `offshoot dump super`: every field of the superblock.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs_format::chunk::DevItem;
use offshoot_btrfs_format::csum::Checksum;
use offshoot_btrfs_format::superblock::{RootBackup, Superblock};

use super::chunks;
use super::fields::{Fields, Value};
use crate::args::InfoArguments;
use crate::exit::Result;
use crate::output::{Console, write_line};
use crate::session::Session;

pub(super) fn run(
    arguments: &InfoArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let session = Session::open(&arguments.volume, console)?;
    let fields = fields(session.volume.superblock());
    if arguments.json {
        return Ok(write_line(out, &fields)?);
    }
    for (name, value) in &fields.0 {
        match value {
            Value::List(list) if list.iter().any(|value| matches!(value, Value::Fields(_))) => {
                for (at, value) in list.iter().enumerate() {
                    writeln!(out, "{:<24} {value}", format!("{name}[{at}]"))?;
                }
            }
            value => writeln!(out, "{name:<24} {value}")?,
        }
    }
    Ok(())
}

fn fields(superblock: &Superblock) -> Fields {
    let item = &superblock.item;
    let checksum = Checksum::stored(&item.csum[..superblock.checksum.len()]).to_string();
    Fields::default()
        .with("csum_type", superblock.checksum.name())
        .with("csum", checksum)
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
        .with("compat_ro_flags", superblock.compat_ro.names())
        .with("incompat_flags", superblock.incompat.names())
        .name("label", item.label())
        .with("cache_generation", item.cache_generation)
        .with("uuid_tree_generation", item.uuid_tree_generation)
        .with("nr_global_roots", item.nr_global_roots)
        .with("dev_item", device(&item.dev_item))
        .with("sys_chunk_array_size", item.sys_chunk_array_size)
        .with(
            "sys_chunk_array",
            superblock.system_chunks.iter().map(chunks::fields).collect::<Vec<_>>(),
        )
        .with("super_roots", item.super_roots.iter().map(backup).collect::<Vec<_>>())
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
