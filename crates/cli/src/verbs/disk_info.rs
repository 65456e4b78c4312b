//! What `info` shows of the disk that holds a volume: layers and partitions.

use std::io::Write;

use serde::Serialize;

use crate::args::VolumeArguments;
use crate::disk::WholeDisk;
use crate::exit::Result;
use crate::output::{Escaped, human_size, json_name};
use crate::session::Access;

/// A disk.
#[derive(Default, Serialize)]
pub(super) struct DiskInfo {
    /// The layers of the file, lowest first, such as `gpt:2` and `btrfs`.
    layers: Vec<String>,
    /// The internal snapshots of the image.
    image_snapshots: Vec<String>,
    partitions: Vec<PartitionInfo>,
    /// Whether the name selects one volume.
    #[serde(skip)]
    pub(super) has_volume: bool,
}

#[derive(Serialize)]
struct PartitionInfo {
    number: u32,
    start: u64,
    size: u64,
    label: String,
    uuid: String,
    /// The signature that was found in the partition.
    holds: Option<&'static str>,
    volume_label: String,
    /// The disk ends inside the partition.
    cut_off: bool,
    #[serde(skip)]
    shown: String,
}

impl DiskInfo {
    /// Reads the disk that the arguments name. The result is empty without a partition table, and
    /// for a mounted volume: the serving process may not open files any more.
    pub(super) fn read(arguments: &VolumeArguments) -> Result<Self> {
        if arguments.open.live.is_some() {
            return Ok(Self { has_volume: true, ..Self::default() });
        }
        let whole =
            WholeDisk::open(&arguments.volume, Access::Read, &arguments.open.layers, false)?;
        let contents = whole.contents()?;
        let has_volume = arguments.open.layers.offset.is_some()
            || contents.table.is_none()
            || whole.name.partition.is_some()
            || contents.choose(&whole.name, false).is_ok();
        let Some((table, held)) = contents.table else {
            let (layers, image_snapshots) = (whole.layers, whole.snapshots);
            return Ok(Self { layers, image_snapshots, partitions: Vec::new(), has_volume });
        };
        let partitions =
            table.partitions.iter().zip(&held).map(|(partition, held)| PartitionInfo {
                number: partition.number,
                start: partition.range.start,
                size: partition.size_bytes(),
                label: partition.label.clone(),
                uuid: partition.uuid.clone(),
                holds: held.what,
                volume_label: json_name(&held.label),
                cut_off: held.is_cut_off,
                shown: held.shown(),
            });
        let partitions = partitions.collect();
        let layers = [whole.layers, vec![table.kind.name().to_owned()]].concat();
        Ok(Self { layers, image_snapshots: whole.snapshots, partitions, has_volume })
    }

    /// The same with the layers below the opened volume and with the format of the volume.
    pub(super) fn with_volume(self, layers: &[String], format: &str) -> Self {
        let layers = layers.iter().cloned().chain([format.to_owned()]).collect();
        Self { layers, ..self }
    }

    /// Prints it as lines, if there is anything between the file and the volume.
    pub(super) fn print(&self, out: &mut dyn Write) -> Result {
        if self.layers.len() > 1 || !self.has_volume {
            writeln!(out, "{:<18} {}", "layers", self.layers.join(" > "))?;
        }
        if !self.image_snapshots.is_empty() {
            let names = self.image_snapshots.join(", ");
            writeln!(out, "{:<18} {}", "image snapshots", Escaped(names.as_bytes()))?;
        }
        if !self.partitions.is_empty() {
            writeln!(out, "partitions")?;
        }
        for partition in &self.partitions {
            let PartitionInfo { number, size, label, uuid, shown, .. } = partition;
            let label = Escaped(label.as_bytes()).to_string();
            let label = if label.is_empty() { "no label" } else { &label };
            let size = human_size(*size);
            writeln!(out, "  {number:<4} {size:>10}  {uuid}  {label}  holds {shown}")?;
        }
        Ok(())
    }
}
