//! What a disk and its partitions hold, and which partition a name selects.

use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use offshoot_device::{
    BlockDevice, DiskContents, Partition, PartitionContents, PartitionTable, TableKind,
    VolumeFormat, occupant_at,
};

use super::DiskName;
use super::format::label_of;
use crate::exit::{Result, VerbFailure};
use crate::output::{Escaped, human_size};

/// The formats that are opened, in messages.
const KNOWN: &str = VolumeFormat::NAMES;

/// The contents of a disk.
pub(crate) struct NamedContents {
    file: PathBuf,
    /// What the disk as a whole is, by its signature.
    whole: Option<&'static str>,
    /// The partition table, and what each partition holds.
    pub(crate) table: Option<(PartitionTable, Vec<PartitionHolding>)>,
    /// Whether the sector size of the table is a guess that only the contents of the partitions
    /// support.
    pub(crate) is_table_guessed: bool,
}

/// The contents of a partition.
pub(crate) struct PartitionHolding {
    /// What it is, by its signature.
    pub(crate) what: Option<&'static str>,
    /// The label of the volume.
    pub(crate) label: Vec<u8>,
    /// Whether the disk ends inside the partition, because the image is truncated.
    pub(crate) is_cut_off: bool,
}

/// The partition that a name selects.
pub(crate) struct ChosenPartition {
    /// The kind of the table.
    pub(crate) kind: TableKind,
    /// The partition.
    pub(crate) partition: Partition,
    /// A warning about the table.
    pub(crate) warning: Option<String>,
}

impl PartitionHolding {
    fn is_known(&self) -> bool {
        self.what.and_then(VolumeFormat::of).is_some()
    }

    /// The contents in words.
    pub(crate) fn shown(&self) -> String {
        let what = self.what.unwrap_or("nothing that is known");
        let label = match &*self.label {
            [] => String::new(),
            label => format!(", labelled {}", Escaped(label)),
        };
        let end = if self.is_cut_off { ", cut off by the end of the disk" } else { "" };
        format!("{what}{label}{end}")
    }
}

impl NamedContents {
    /// Looks at the disk in `file`.
    pub(crate) fn read(device: &dyn BlockDevice, file: &Path) -> Result<Self> {
        let look = |start, len| {
            let Some(what) = occupant_at(device, start, len)? else { return Ok(None) };
            let format = VolumeFormat::of(what);
            let label = format.map(|format| label_of(format, device, start)).transpose()?;
            Ok(Some((what, label.unwrap_or_default())))
        };
        let contents =
            DiskContents::read(device, look, |(what, _)| VolumeFormat::of(what).is_some());
        let DiskContents { whole, table, is_table_guessed } =
            contents.map_err(|error| VerbFailure::Host(file.display().to_string(), error))?;
        let held = |PartitionContents { what, is_cut_off }| {
            let (what, label) = what.unzip();
            PartitionHolding { what, label: label.unwrap_or_default(), is_cut_off }
        };
        Ok(Self {
            file: file.to_path_buf(),
            whole: whole.map(|(what, _)| what),
            table: table.map(|(table, all)| (table, all.into_iter().map(held).collect())),
            is_table_guessed,
        })
    }

    /// The format of the volume that the disk as a whole is.
    fn format(&self) -> Option<VolumeFormat> {
        self.whole.and_then(VolumeFormat::of)
    }

    /// The partition that `name` selects; `None` for the whole disk.
    pub(crate) fn choose(
        &self,
        name: &DiskName,
        may_have_path: bool,
    ) -> Result<Option<ChosenPartition>> {
        let shown = Escaped(self.file.as_os_str().as_bytes());
        let end = if may_have_path { ":/" } else { "" };
        let format = self.format();
        if let (Some((table, _)), None, Some(format)) = (&self.table, &name.partition, format)
            && !table.partitions.is_empty()
        {
            // Most likely one of the two is left over from an earlier use.
            let message = format!(
                "{shown} holds {} over the whole disk and a partition table too: write \
                 {shown}@NUMBER{end}, or --offset 0 for the whole disk",
                format.name()
            );
            return Err(VerbFailure::Refused(message));
        }
        let (table, held) = match (&self.table, &name.partition) {
            (_, None) if format.is_some() => return Ok(None),
            (Some((table, held)), _) => (table, held),
            (None, Some(partition)) => {
                let partition = Escaped(partition.as_bytes());
                let message = format!(
                    "{shown} has no partition table, and so no partition {partition}: \
                     write {shown}{end}"
                );
                return Err(VerbFailure::Usage(message));
            }
            (None, None) => {
                return match self.whole {
                    Some(what) => {
                        Err(VerbFailure::Refused(format!("{shown}: {what}, not {KNOWN}")))
                    }
                    // The engine may find more than a signature; if not, its error says what is
                    // missing.
                    None => Ok(None),
                };
            }
        };
        let is_meant = |partition: &Partition, held: &PartitionHolding| match &name.partition {
            None => held.is_known(),
            Some(text) => is_named(partition, held, text.as_bytes()),
        };
        let all = || table.partitions.iter().zip(held);
        let mut meant: Vec<&Partition> = all()
            .filter(|(partition, held)| is_meant(partition, held))
            .map(|(partition, _)| partition)
            .collect();
        // Partition numbers take precedence over labels.
        if let Some(text) = &name.partition
            && let Some(partition) = meant.iter().find(|one| is_number(one, text.as_bytes()))
        {
            meant = vec![partition];
        }
        if let [partition] = meant[..] {
            let (kind, warning) = (table.kind, table.warning.clone());
            return Ok(Some(ChosenPartition { kind, partition: partition.clone(), warning }));
        }
        let what = match (&name.partition, meant.len()) {
            (None, 0) => format!("none of its partitions holds {KNOWN}"),
            (None, count) => format!("{count} of its partitions hold {KNOWN}"),
            (Some(text), 0) => format!("no partition is called {}", Escaped(text.as_bytes())),
            (Some(text), count) => {
                format!("{count} partitions are called {}", Escaped(text.as_bytes()))
            }
        };
        let mut message =
            format!("{shown}: a disk with {} {}, and {what}", article(table.kind), table.kind);
        for (partition, held) in all() {
            let (number, size) = (partition.number, human_size(partition.size_bytes()));
            let _ = write!(message, "\npartition {number}, {size}, holds {}", held.shown());
            if held.is_known() {
                let _ = write!(message, ": write {shown}@{number}{end}");
            }
        }
        Err(if meant.is_empty() && name.partition.is_none() {
            VerbFailure::Refused(message)
        } else {
            VerbFailure::Usage(message)
        })
    }
}

fn article(kind: TableKind) -> &'static str {
    match kind {
        TableKind::Gpt => "a",
        TableKind::Mbr => "an",
    }
}

/// Whether `text` is the number of the partition.
fn is_number(partition: &Partition, text: &[u8]) -> bool {
    partition.number.to_string().as_bytes() == text
}

/// Whether `text` names the partition: by number, by UUID, by its label or by that of its volume.
fn is_named(partition: &Partition, held: &PartitionHolding, text: &[u8]) -> bool {
    is_number(partition, text)
        || partition.uuid.as_bytes().eq_ignore_ascii_case(text)
        || !text.is_empty() && (partition.label.as_bytes() == text || held.label == text)
}
