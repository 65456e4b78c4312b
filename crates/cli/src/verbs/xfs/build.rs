//! A volume of XFS that is filled once.

use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_transfer::build::SourceSize;
use offshoot_vfs::{self as vfs, FileSystem, Volume};
use offshoot_xfs::{XfsOptions, XfsVolume};

use crate::output::Console;
use crate::verbs::build::FreshVolume;
use crate::verbs::mkfs::NewVolumeArguments;

/// The least size of a volume, as for `mkfs`.
const LEAST_BYTES: u64 = 300 << 20;

/// The usual log of a volume of up to 128 GiB.
const LOG_BYTES: u64 = 64 << 20;

/// What a directory takes beside its names.
const DIRECTORY_BYTES: u64 = 4 << 10;

/// How often a name is stored: in the directory, in its index, and as parent pointer.
const NAME_COPIES: u64 = 4;

/// What a name takes beside its bytes.
const NAME_BYTES: u64 = 64;

/// The memory for metadata blocks. A build looks at the directories that it fills, and at few
/// others.
const CACHE_BYTES: u64 = 32 << 20;

/// The memory for data that is not written yet.
const DIRTY_BYTES: u64 = 16 << 20;

/// Opens a new volume to be filled.
pub(in crate::verbs) fn open_new(
    device: Arc<dyn BlockDevice>,
    console: &Arc<Console>,
) -> vfs::Result<FreshVolume> {
    let console = console.clone();
    let options = XfsOptions {
        cache_bytes: CACHE_BYTES,
        dirty_bytes: DIRTY_BYTES,
        sync_interval: None,
        is_reproducible: true,
        reporter: Some(Arc::new(move |report| console.warning(report))),
        ..XfsOptions::default()
    };
    let volume = XfsVolume::open_writable(device, &options)?;
    let files = volume.clone().files(volume.root().dev)?;
    Ok(FreshVolume { volume, files, btrfs: None })
}

/// The size of a volume that has room for `size`: an estimate that is rather too large.
pub(in crate::verbs) fn size_for(size: &SourceSize, arguments: &NewVolumeArguments) -> u64 {
    let xfs = &arguments.xfs;
    let block = u64::from(xfs.block_size.unwrap_or(4096)).max(4096);
    // Files end in the middle of a block, which may be larger than the unit that was counted in.
    let data = size.sector_bytes.saturating_add(size.entries.saturating_mul(block - 4096));
    let inode = u64::from(xfs.inode_size.unwrap_or(512));
    let inodes = size.entries.saturating_mul(inode + NAME_BYTES * NAME_COPIES);
    let directories = size.directories.saturating_mul(DIRECTORY_BYTES.max(block));
    let names = size.text_bytes.saturating_mul(NAME_COPIES);
    let all = data.saturating_add(inodes).saturating_add(directories).saturating_add(names);
    let log = xfs.log_size.unwrap_or((all / 2048).max(LOG_BYTES));
    // Trees of space and owners, and what the volume keeps back for itself.
    let rest = (all / 10).max(32 << 20);
    all.saturating_add(rest).saturating_add(log).max(LEAST_BYTES).next_multiple_of(1 << 20)
}
