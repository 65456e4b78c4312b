//! `offshoot info` for btrfs.

use std::io::Write;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::BtrfsVolume;
use offshoot_btrfs_format::space::QgroupStatusItem;
use offshoot_btrfs_format::superblock::SUPER_FLAG_SEEDING;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_vfs::{self as vfs, Errno};
use serde::Serialize;

use super::space::{Allocation, allocations};
use crate::exit::Result;
use crate::output::{Console, Escaped, human_size, json_name, write_line};
use crate::session::Session;
use crate::verbs::disk_info::DiskInfo;

#[derive(Serialize)]
struct Info {
    label: String,
    uuid: String,
    metadata_uuid: String,
    generation: u64,
    size: u64,
    used: u64,
    node_size: u32,
    sector_size: u32,
    checksum: &'static str,
    incompat: Vec<String>,
    compat_ro: Vec<String>,
    compat: u64,
    log_pending: bool,
    seed: bool,
    /// The state of the quotas in words; empty if the volume has no quotas, absent if it cannot be
    /// read.
    quotas: Option<Vec<&'static str>>,
    /// Absent if it cannot be read.
    default_subvolume: Option<u64>,
    /// Absent if they cannot be counted.
    subvolumes: Option<usize>,
    devices: Vec<Device>,
    profiles: Vec<Allocation>,
    reports: Vec<String>,
    #[serde(flatten)]
    disk: DiskInfo,
    #[serde(skip)]
    label_bytes: Vec<u8>,
}

#[derive(Serialize)]
struct Device {
    id: u64,
    uuid: String,
    path: Option<String>,
    missing: bool,
    stale: bool,
    seed: bool,
    size: u64,
    allocated: u64,
}

/// Shows the volume of `session`, which is on `disk`.
pub(in crate::verbs) fn show(
    session: &Session,
    disk: DiskInfo,
    is_json: bool,
    out: &mut dyn Write,
    console: &Console,
) -> Result {
    let info = Info::new(session, disk, console);
    if is_json { Ok(write_line(out, &info)?) } else { info.print(out) }
}

impl Info {
    fn new(session: &Session, disk: DiskInfo, console: &Console) -> Self {
        let volume = &session.volume;
        let superblock = volume.superblock();
        let devices = volume.members().iter().map(|member| Device {
            id: member.id.0,
            uuid: member.uuid.to_string(),
            path: member.device.as_ref().map(|device| device.name().to_owned()),
            missing: member.device.is_none(),
            stale: member.is_stale(),
            seed: member.is_seed,
            size: member.total_bytes(),
            allocated: member.allocated_bytes,
        });
        Self {
            label: json_name(superblock.item.label()),
            label_bytes: superblock.item.label().to_vec(),
            uuid: superblock.fsid.to_string(),
            metadata_uuid: superblock.metadata_uuid.to_string(),
            generation: superblock.generation.0,
            size: superblock.item.total_bytes.get(),
            used: superblock.item.bytes_used.get(),
            node_size: superblock.node_size,
            sector_size: superblock.sector_size,
            checksum: superblock.checksum.name(),
            incompat: superblock.incompat.names(),
            compat_ro: superblock.compat_ro.names(),
            compat: superblock.item.compat_flags.get(),
            log_pending: superblock.has_pending_log(),
            seed: superblock.item.flags.get() & SUPER_FLAG_SEEDING != 0,
            quotas: quotas(volume).map_err(|error| console.warning(&error)).ok(),
            default_subvolume: volume
                .default_subvolume()
                .map_err(|error| console.warning(&error))
                .ok()
                .map(|id| id.0),
            subvolumes: volume.subvolume_count().map_err(|error| console.warning(&error)).ok(),
            devices: devices.collect(),
            profiles: allocations(volume, console),
            // Last, because everything above may add a report.
            reports: session.reports(),
            disk: disk.with_volume(&session.layers, "btrfs"),
        }
    }

    fn print(&self, out: &mut dyn Write) -> Result {
        self.disk.print(out)?;
        let or_none = |list: &[String]| {
            if list.is_empty() { "none".to_owned() } else { list.join(", ") }
        };
        let label = Escaped(&self.label_bytes).to_string();
        let mut line = |name: &str, text: &str| writeln!(out, "{name:<18} {text}");
        line("label", if label.is_empty() { "none" } else { &label })?;
        line("UUID", &self.uuid)?;
        if self.metadata_uuid != self.uuid {
            line("metadata UUID", &self.metadata_uuid)?;
        }
        line("size", &human_size(self.size))?;
        line("used", &human_size(self.used))?;
        line("node size", &human_size(self.node_size.into()))?;
        line("sector size", &human_size(self.sector_size.into()))?;
        line("checksum", self.checksum)?;
        line("generation", &self.generation.to_string())?;
        line("incompat", &or_none(&self.incompat))?;
        line("compat_ro", &or_none(&self.compat_ro))?;
        if self.compat != 0 {
            line("compat", &format!("{:#x}", self.compat))?;
        }
        let or_unknown =
            |number: Option<u64>| number.map_or("unknown".to_owned(), |number| number.to_string());
        let count = or_unknown(self.subvolumes.map(|count| count as u64));
        let default = or_unknown(self.default_subvolume);
        line("subvolumes", &format!("{count}, default is {default}"))?;
        match self.quotas.as_deref() {
            Some([]) => line("quotas", "off")?,
            Some(words) => line("quotas", &words.join(", "))?,
            None => line("quotas", "unknown")?,
        }
        line("tree log", if self.log_pending { "pending" } else { "none" })?;
        if self.seed {
            line("seed", "yes, read-only")?;
        }
        writeln!(out, "devices")?;
        for device in &self.devices {
            let mut notes = String::new();
            for (is_set, note) in [(device.stale, ", missed commits"), (device.seed, ", seed")] {
                notes.push_str(if is_set { note } else { "" });
            }
            let path = device.path.as_deref().unwrap_or("MISSING");
            writeln!(
                out,
                "  {:<4} {:>10}, {:>10} allocated  {}  {}{notes}",
                device.id,
                human_size(device.size),
                human_size(device.allocated),
                device.uuid,
                Escaped(path.as_bytes())
            )?;
        }
        writeln!(out, "space")?;
        for profile in &self.profiles {
            let used = profile.used.map_or("unknown".to_owned(), human_size);
            let groups = if profile.block_groups == 1 { "block group" } else { "block groups" };
            writeln!(
                out,
                "  {:<14} {:<8} {:>10}, {used:>10} used, in {} {groups}",
                profile.holds,
                profile.profile,
                human_size(profile.size),
                profile.block_groups
            )?;
        }
        Ok(())
    }
}

/// The flags in the status item of the quota tree, in words.
fn quotas(volume: &Arc<BtrfsVolume>) -> vfs::Result<Vec<&'static str>> {
    const FLAGS: [(u64, &str); 4] =
        [(1, "on"), (1 << 1, "rescan pending"), (1 << 2, "inconsistent"), (1 << 3, "simple")];
    let tree = match volume.tree(TreeId::QUOTA) {
        Ok(tree) => tree,
        Err(vfs::Error::Posix { errno: Errno::NOENT, .. }) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let key = Key::new(0, ItemType::QGROUP_STATUS, 0);
    let mut flags = Ok(0);
    volume.for_each_item(tree, key, |found, data| {
        if found == key {
            flags = QgroupStatusItem::view(data).map(|item| item.flags.get());
        }
        ControlFlow::Break(())
    })?;
    let flags = flags.map_err(|error| vfs::Error::corrupt(error.structure, error.problem))?;
    Ok(FLAGS.iter().filter(|(flag, _)| flags & flag != 0).map(|(_, word)| *word).collect())
}
