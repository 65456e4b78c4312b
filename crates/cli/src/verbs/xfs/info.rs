//! `offshoot info` for XFS.

use std::io::Write;

use offshoot_vfs::{FileSystem, StatFs, Volume};
use offshoot_xfs::{XfsLogState, XfsVolume};
use serde::Serialize;

use crate::exit::Result;
use crate::output::{Console, Escaped, human_size, json_name, write_line};
use crate::session::Session;
use crate::verbs::disk_info::DiskInfo;

#[derive(Serialize)]
struct XfsInfo {
    label: String,
    uuid: String,
    metadata_uuid: String,
    version: u16,
    size: u64,
    /// Absent if the free blocks cannot be counted.
    used: Option<u64>,
    block_size: u32,
    sector_size: u16,
    inode_size: u16,
    groups: u32,
    log_size: u64,
    /// `empty`, `pending` or `unreadable`.
    log: &'static str,
    features: Vec<&'static str>,
    reports: Vec<String>,
    #[serde(flatten)]
    disk: DiskInfo,
    #[serde(skip)]
    label_bytes: Vec<u8>,
    #[serde(skip)]
    log_shown: String,
}

/// Shows the volume of `session`, which is on `disk`.
pub(in crate::verbs) fn show(
    session: &Session<XfsVolume>,
    disk: DiskInfo,
    is_json: bool,
    out: &mut dyn Write,
    console: &Console,
) -> Result {
    let info = XfsInfo::new(session, disk, console);
    if is_json { Ok(write_line(out, &info)?) } else { info.print(out) }
}

impl XfsInfo {
    fn new(session: &Session<XfsVolume>, disk: DiskInfo, console: &Console) -> Self {
        let volume = &session.volume;
        let fields = &volume.superblock().fields;
        let uuid = |bytes| uuid::Uuid::from_bytes(bytes).to_string();
        let log_size = u64::from(fields.logblocks.get()) << fields.blocklog;
        let log = volume.log_state().name();
        let log_shown = match volume.log_state() {
            XfsLogState::Empty => log.to_owned(),
            XfsLogState::Pending => format!("{log}: verbs that read files replay it in memory"),
            XfsLogState::Unreadable(why) => format!("{log}: {why}"),
        };
        let label_bytes = volume.label();
        let used = volume.statfs().map_err(|error| console.warning(&error)).ok();
        Self {
            label: json_name(&label_bytes),
            uuid: uuid(fields.uuid),
            metadata_uuid: volume.superblock().geometry.uuid.to_string(),
            version: fields.version(),
            size: fields.dblocks.get() << fields.blocklog,
            used: used.map(|StatFs { used_bytes, .. }| used_bytes),
            block_size: volume.block_size(),
            sector_size: fields.sectsize.get(),
            inode_size: fields.inodesize.get(),
            groups: fields.agcount.get(),
            log_size,
            log,
            features: volume.features(),
            // Last, because everything above may add a report.
            reports: session.reports(),
            disk: disk.with_volume(&session.layers, "XFS"),
            label_bytes,
            log_shown,
        }
    }

    fn print(&self, out: &mut dyn Write) -> Result {
        self.disk.print(out)?;
        let label = Escaped(&self.label_bytes).to_string();
        let mut line = |name: &str, text: &str| writeln!(out, "{name:<18} {text}");
        line("label", if label.is_empty() { "none" } else { &label })?;
        line("UUID", &self.uuid)?;
        if self.metadata_uuid != self.uuid {
            line("metadata UUID", &self.metadata_uuid)?;
        }
        line("format", &format!("XFS, version {}", self.version))?;
        line("size", &human_size(self.size))?;
        line("used", &self.used.map_or("unknown".to_owned(), human_size))?;
        line("block size", &human_size(self.block_size.into()))?;
        line("sector size", &human_size(self.sector_size.into()))?;
        line("inode size", &human_size(self.inode_size.into()))?;
        line("groups", &self.groups.to_string())?;
        line("features", &self.features.join(", "))?;
        line("log", &format!("{}, {}", human_size(self.log_size), self.log_shown))?;
        Ok(())
    }
}
