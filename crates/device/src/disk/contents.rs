//! What a disk and its partitions hold.

use std::io;

use crate::{BlockDevice, Partition, PartitionTable, TableKind};

/// The larger one of the two common sector sizes.
const LARGE_SECTOR_BYTES: u64 = 4096;

/// The contents of a disk. The caller knows signatures: a `T` is what it found.
pub struct DiskContents<T> {
    /// What the disk as a whole is.
    pub whole: Option<T>,
    /// The partition table, and what each partition holds.
    pub table: Option<(PartitionTable, Vec<PartitionContents<T>>)>,
    /// Whether the sector size of the table is a guess that only the contents of the partitions
    /// support.
    pub is_table_guessed: bool,
}

/// The contents of a partition.
pub struct PartitionContents<T> {
    /// What it is.
    pub what: Option<T>,
    /// Whether the disk ends inside the partition, because the image is truncated.
    pub is_cut_off: bool,
}

impl<T> DiskContents<T> {
    /// Looks at a disk. `look` finds what begins at a byte and has a length; the bytes are all on
    /// the disk. `is_volume` says whether that is a volume that the caller opens.
    ///
    /// # Errors
    /// Those of the device, and of a partition table that contradicts itself.
    pub fn read(
        device: &dyn BlockDevice,
        look: impl Fn(u64, u64) -> io::Result<Option<T>>,
        is_volume: impl Fn(&T) -> bool,
    ) -> io::Result<Self> {
        let whole = look(0, device.size_bytes())?;
        let table = match PartitionTable::read(device) {
            // The first sectors of a volume may still hold parts of an old table.
            Err(error)
                if error.kind() == io::ErrorKind::InvalidData
                    && whole.as_ref().is_some_and(is_volume) =>
            {
                None
            }
            other => other?,
        };
        let held_by = |partition: &Partition| {
            let start = partition.range.start;
            let there = device.size_bytes().saturating_sub(start);
            let is_cut_off = there < partition.size_bytes();
            let what = look(start, partition.size_bytes().min(there))?;
            Ok(PartitionContents { what, is_cut_off })
        };
        let with_contents = |table: PartitionTable| {
            let held = table.partitions.iter().map(held_by).collect::<io::Result<Vec<_>>>()?;
            Ok::<_, io::Error>((table, held))
        };
        let mut table = table.map(with_contents).transpose()?;
        let mut is_table_guessed = false;
        if let Some((first, held)) = &table
            && first.kind == TableKind::Mbr
            && device.logical_sector_bytes().is_none()
            && held.iter().all(|held| held.what.is_none())
        {
            // The file may be a copy of a disk with larger sectors. A known signature in a
            // partition at the larger sector size proves it, but only if all partitions fit on the
            // disk: otherwise the signature is left over from an older layout. A read error at a
            // guessed position proves nothing.
            let large = PartitionTable::read_mbr(device, LARGE_SECTOR_BYTES);
            let large = large.and_then(|large| large.map(with_contents).transpose()).ok().flatten();
            if let Some((mut large, large_held)) = large
                && large.partitions.len() >= first.partitions.len()
                && large_held.iter().any(|one| one.what.is_some())
                && !large_held.iter().any(|one| one.is_cut_off)
            {
                let guess = format!(
                    "its MBR seems to count in sectors of {LARGE_SECTOR_BYTES} bytes, because \
                     only so its partitions hold something"
                );
                large.warning = Some(match large.warning {
                    Some(first) => format!("{first}; {guess}"),
                    None => guess,
                });
                is_table_guessed = true;
                table = Some((large, large_held));
            }
        }
        Ok(Self { whole, table, is_table_guessed })
    }
}
