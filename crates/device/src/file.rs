//! A device that is a file or a block device of the host.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use rustix::fs::{Advice, fadvise};

use crate::BlockDevice;

/// An image file or a block device, read through the page cache of the host.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    name: String,
    size_bytes: u64,
}

impl FileDevice {
    /// Opens `path` for reading.
    ///
    /// # Errors
    /// When it cannot be opened, or is neither a regular file nor a block device.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let file_type = file.metadata()?.file_type();
        if !file_type.is_file() && !file_type.is_block_device() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "neither a regular file nor a block device",
            ));
        }
        // The metadata of a block device says nothing of its size; its end does.
        let size_bytes = file.seek(SeekFrom::End(0))?;
        // The engine says itself what it will read next; the host's guess from
        // interleaved readers would only fetch what nobody asked for.
        fadvise(&file, 0, None, Advice::Random)?;
        Ok(Self { file, name: path.display().to_string(), size_bytes })
    }
}

impl BlockDevice for FileDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        // A hint that is refused costs speed and nothing else.
        let _ = fadvise(&self.file, offset, NonZeroU64::new(len), Advice::WillNeed);
    }
}
