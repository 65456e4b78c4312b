//! What is printed when the volume is made.
//!
//! It has the form of the tool's own, so that a program finds `UUID:` in it. The numbers are read
//! back from the volume.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions};
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_device::BlockDevice;

use super::arguments::DropinArguments;
use super::devices::queue_attribute;
use super::features;
use crate::exit::Result;
use crate::output::{Console, Escaped};
use crate::verbs::btrfs::space::allocations;

/// Reads the volume on `devices` back, and prints what it is unless the user wants quiet.
pub(super) fn print(
    arguments: &DropinArguments,
    devices: Vec<Arc<dyn BlockDevice>>,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    if arguments.quiet {
        return Ok(());
    }
    let volume = BtrfsVolume::open(devices, &EngineOptions::default())?;
    let superblock = volume.superblock();
    writeln!(out, "offshoot {} as mkfs.btrfs\n", env!("CARGO_PKG_VERSION"))?;
    if let Some(rootdir) = &arguments.rootdir {
        let top = rootdir.canonicalize().unwrap_or_else(|_| rootdir.clone());
        line(out, "Rootdir from:", &top.display().to_string())?;
        line(out, "  Compress:", arguments.compression_name())?;
        line(out, "  Shrink:", if arguments.shrink { "yes" } else { "no" })?;
    }
    let label = arguments.label.as_ref().map(|_| Escaped(superblock.item.label()).to_string());
    line(out, "Label:", label.as_deref().unwrap_or("(null)"))?;
    line(out, "UUID:", &superblock.fsid.to_string())?;
    if let Some(uuid) = arguments.device_uuid {
        line(out, "Device UUID:", &uuid.to_string())?;
    }
    line(out, "Node size:", &superblock.node_size.to_string())?;
    let page = rustix::param::page_size();
    line(out, "Sector size:", &format!("{}\t(CPU page size: {page})", superblock.sector_size))?;
    line(out, "Filesystem size:", &size(superblock.item.total_bytes.get()))?;
    print_profiles(&volume, out, console)?;
    let first = arguments.devices.first();
    let is_fixed = |path| queue_attribute(path, "rotational").is_some_and(|text| text == "0");
    let is_ssd = first.is_some_and(|path| is_fixed(path));
    line(out, "SSD detected:", if is_ssd { "yes" } else { "no" })?;
    line(out, "Zoned device:", "no")?;
    let features = features::names(superblock.incompat, superblock.compat_ro);
    line(out, "Features:", &features.join(", "))?;
    let checksum = match superblock.checksum {
        ChecksumType::Blake2b => "blake2b",
        checksum => checksum.name(),
    };
    line(out, "Checksum:", checksum)?;
    let members = volume.members();
    line(out, "Number of devices:", &members.len().to_string())?;
    writeln!(out, "Devices:\n   ID        SIZE  PATH")?;
    for (member, path) in members.iter().zip(&arguments.devices) {
        let (id, bytes) = (member.id.0, size(member.total_bytes()));
        writeln!(out, "{id:>5}  {bytes:>10}  {}", path.display())?;
    }
    Ok(writeln!(out)?)
}

fn line(out: &mut dyn Write, name: &str, text: &str) -> Result {
    Ok(writeln!(out, "{name:<20}{text}")?)
}

fn print_profiles(
    volume: &Arc<BtrfsVolume>,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    writeln!(out, "Block group profiles:")?;
    let mut found = allocations(volume, console);
    // Data, metadata, system.
    found.sort_by_key(|allocation| allocation.holds);
    for allocation in found {
        let profile = match allocation.profile.as_str() {
            "single" => "single".to_owned(),
            profile => profile.to_uppercase(),
        };
        let holds = format!("{}:", capitalised(allocation.holds));
        writeln!(out, "  {holds:<18}{profile:<10}{:>15}", size(allocation.size))?;
    }
    Ok(())
}

/// `data+metadata` as `Data+Metadata`.
fn capitalised(words: &str) -> String {
    let mut is_first = true;
    let capital = |letter: char| {
        let shown = if is_first { letter.to_ascii_uppercase() } else { letter };
        is_first = !letter.is_ascii_alphabetic();
        shown
    };
    words.chars().map(capital).collect()
}

/// A size as the tool writes it: `8.00MiB`.
fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = bytes.checked_ilog2().unwrap_or(0) / 10;
    let scale = 1_u128 << (10 * power);
    let hundredths = (u128::from(bytes) * 100 + scale / 2) / scale;
    let unit = UNITS.get(power as usize).copied().unwrap_or_default();
    format!("{}.{:02}{unit}", hundredths / 100, hundredths % 100)
}
