//! The bodies of tests with hostile bytes, shared by the stable tests and the fuzz targets.
//!
//! No user calls all of them.

#![allow(dead_code, reason = "each user calls a part of it")]

use std::io;
use std::sync::Arc;

use offshoot_device::{
    BlockDevice, ImageKind, MemoryDevice, PartitionTable, Qcow2Header, Qcow2Options,
    VmdkDescriptor, WindowDevice, open_image, open_qcow2, open_vmdk,
};

/// A device of `size_bytes` that begins with `bytes`.
pub(crate) fn disk(bytes: &[u8], size_bytes: u64) -> Arc<dyn BlockDevice> {
    let device = MemoryDevice::sparse(size_bytes);
    let len = bytes.len().min(usize::try_from(size_bytes).unwrap_or(usize::MAX));
    device.write_at(0, &bytes[..len]).expect("the bytes fit");
    Arc::new(device)
}

/// Reads the partition table of a disk that begins with `bytes`, as it is and with the checksums of
/// its GPT corrected. The reader must refuse the table or return partitions that begin on the disk.
pub(crate) fn partition_table(bytes: &[u8]) {
    const DISK_BYTES: u64 = 1 << 20;
    let mended = |sector_bytes: usize| {
        let mut mended = bytes.to_vec();
        mend_gpt(&mut mended, sector_bytes);
        mended
    };
    for (bytes, sector_bytes) in [
        (bytes.to_vec(), None),
        (mended(512), None),
        (mended(4096), None),
        (mended(4096), Some(4096)),
        (mended(2048), Some(2048)),
    ] {
        let bytes = &bytes;
        let disk: Arc<dyn BlockDevice> =
            Arc::new(SectorDevice(disk(bytes, DISK_BYTES), sector_bytes));
        for read in [PartitionTable::read(&*disk), PartitionTable::read_mbr(&*disk, 4096)] {
            partitions_are_on(&disk, read);
        }
    }
}

fn partitions_are_on(disk: &Arc<dyn BlockDevice>, read: io::Result<Option<PartitionTable>>) {
    match read {
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}"),
        Ok(None) => {}
        Ok(Some(table)) => {
            assert!(table.partitions.len() <= (4 << 20) / 128, "{}", table.partitions.len());
            for partition in table.partitions {
                let range = partition.range.clone();
                let window = WindowDevice::new(disk.clone(), range, "window".to_owned());
                let window = window.expect("every partition begins on the disk");
                assert!(window.size_bytes() <= partition.size_bytes());
                let _ = window.read_at(0, &mut [0; 16]);
            }
        }
    }
}

/// A device that says how large its sectors are.
#[derive(Debug)]
struct SectorDevice(Arc<dyn BlockDevice>, Option<u64>);

impl offshoot_device::Delegate for SectorDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0
    }

    fn logical_sector_bytes(&self) -> Option<u64> {
        self.1
    }
}

/// Corrects the checksums of a GPT with sectors of `sector_bytes`, if there is one.
pub(crate) fn mend_gpt(bytes: &mut [u8], sector_bytes: usize) {
    let header = sector_bytes;
    if bytes.len() < header + 92 {
        return;
    }
    let number = |bytes: &[u8], at: usize, len: usize| {
        let mut number = [0; 8];
        number[..len].copy_from_slice(&bytes[header + at..header + at + len]);
        u64::from_le_bytes(number)
    };
    let first = number(bytes, 72, 8).checked_mul(sector_bytes as u64);
    let len = number(bytes, 80, 4).checked_mul(number(bytes, 84, 4));
    let end = first.zip(len).and_then(|(first, len)| first.checked_add(len));
    if let (Some(first), Some(end)) = (first, end)
        && end <= bytes.len() as u64
    {
        let entries = usize::try_from(first).expect("small")..usize::try_from(end).expect("small");
        let sum = crc32(&bytes[entries]);
        bytes[header + 88..header + 92].copy_from_slice(&sum.to_le_bytes());
    }
    bytes[header + 16..header + 20].fill(0);
    let sum = crc32(&bytes[header..header + 92]);
    bytes[header + 16..header + 20].copy_from_slice(&sum.to_le_bytes());
}

fn crc32(bytes: &[u8]) -> u32 {
    let mut crc = flate2::Crc::new();
    crc.update(bytes);
    crc.sum()
}

/// Opens a file that begins with `bytes` as an image of the kind that it claims to be. The reader
/// must refuse it, or give a disk from which a read of any range returns or fails.
pub(crate) fn image(bytes: &[u8]) {
    const FILE_BYTES: u64 = 4 << 20;
    let file = disk(bytes, FILE_BYTES);
    let Ok(Some(kind)) = ImageKind::detect(&*file) else { return };
    let opened = match kind {
        // A stream is unpacked whole, and one byte of it may stand for a thousand.
        kind if kind.is_stream() => {
            let bytes = &bytes[..bytes.len().min(1 << 16)];
            open_image(disk(bytes, bytes.len() as u64), kind)
        }
        ImageKind::Qcow2 => Qcow2Header::read(&*file).and_then(|header| {
            for snapshot in header.snapshots.iter().take(2) {
                let snapshot = Some(snapshot.clone());
                let options = Qcow2Options { snapshot, ..Qcow2Options::default() };
                read_some(open_qcow2(file.clone(), &header, options));
            }
            let options = Qcow2Options { is_writable: true, ..Qcow2Options::default() };
            let own = Arc::new(MemoryDevice::over(file.clone()));
            write_some(open_qcow2(own, &header, options));
            open_qcow2(file.clone(), &header, Qcow2Options::default())
        }),
        ImageKind::Vmdk => {
            write_some(open_vmdk(Arc::new(MemoryDevice::over(file.clone())), true));
            open_image(file, kind)
        }
        // A descriptor is a small file. Every file that it names is this device.
        ImageKind::VmdkDescriptor => {
            let open = |is_writable| {
                let own: Arc<dyn BlockDevice> =
                    Arc::new(MemoryDevice::new(bytes[..bytes.len().min(1 << 16)].to_vec()));
                let descriptor = VmdkDescriptor::read(&*own)?;
                let file: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over(file.clone()));
                let files = vec![file; descriptor.files.len()];
                descriptor.open(own, &files, is_writable)
            };
            write_some(open(true));
            open(false)
        }
        kind => open_image(file, kind),
    };
    read_some(opened);
}

fn write_some(opened: io::Result<Arc<dyn BlockDevice>>) {
    let Ok(device) = opened else { return };
    for offset in [0, 70_000, device.size_bytes().saturating_sub(512)] {
        let _ = device.write_at(offset, &[7; 512]);
    }
    let _ = device.discard(512, 1 << 20);
    let _ = device.flush();
    let _ = device.write_at(100, &[8; 16_000]);
    let _ = device.flush();
}

fn read_some(opened: io::Result<Arc<dyn BlockDevice>>) {
    let Ok(device) = opened else { return };
    let size = device.size_bytes();
    for offset in [0, 511, 65_536, 1 << 20, size / 2, size.saturating_sub(1000)] {
        let _ = device.read_at(offset, &mut [0; 1000]);
    }
    device.read_at(size, &mut [0; 1]).expect_err("behind its end there is nothing");
    device.write_at(0, &[0]).expect_err("it can only be read");
}
