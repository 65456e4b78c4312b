//! Windows and partition tables, also those of hostile disks.

mod bodies;

use std::io::{self, IoSlice};
use std::sync::Arc;

use bodies::{disk, mend_gpt};
use offshoot_device::{
    BlockDevice, FaultDevice, MemoryDevice, PartitionTable, RequestKind, TableKind, WindowDevice,
};
use offshoot_testkit::random::Random;

const MIB: u64 = 1 << 20;

fn window(below: Arc<dyn BlockDevice>, range: std::ops::Range<u64>) -> io::Result<WindowDevice> {
    WindowDevice::new(below, range, "window".to_owned())
}

#[test]
fn nothing_outside_of_a_window_is_reached() {
    let below = disk(&vec![0xee; 3 << 20], 3 * MIB);
    let window = window(below.clone(), MIB..2 * MIB).expect("it is on the device");
    assert_eq!((window.name(), window.size_bytes()), ("window", MIB));
    window.write_at(0, &[1; 100]).expect("a write");
    let bufs = [IoSlice::new(&[2; 50]), IoSlice::new(&[3; 50])];
    window.write_vectored_at(MIB - 100, &bufs).expect("the last bytes");
    window.discard(4096, 4096).expect("a discard");
    window.prefetch(0, u64::MAX);
    let mut buf = [0; 100];
    window.read_medium_at(MIB - 100, &mut buf).expect("a read");
    assert_eq!((buf[0], buf[99]), (2, 3));
    for (offset, len) in [(MIB - 99, 100), (MIB, 1), (u64::MAX, 1), (u64::MAX - 10, 100)] {
        let mut buf = vec![0; len];
        let results = [
            window.read_at(offset, &mut buf),
            window.read_medium_at(offset, &mut buf),
            window.write_at(offset, &buf),
            window.write_vectored_at(offset, &[IoSlice::new(&buf)]),
            window.discard(offset, len as u64),
        ];
        for (at, result) in results.into_iter().enumerate() {
            let kind = result.err().map(|error| error.kind());
            assert_eq!(kind, Some(io::ErrorKind::UnexpectedEof), "request {at} at {offset}");
        }
    }
    let mut all = vec![0; 3 << 20];
    below.read_at(0, &mut all).expect("a read of everything");
    assert!(all[..1 << 20].iter().all(|&byte| byte == 0xee), "bytes in front of it changed");
    assert!(all[2 << 20..].iter().all(|&byte| byte == 0xee), "bytes behind it changed");
}

#[test]
fn barriers_and_discards_pass_through() {
    let below = Arc::new(FaultDevice::new(Arc::new(MemoryDevice::sparse(MIB))));
    let window = window(below.clone(), 4096..8192).expect("it is on the device");
    window.flush().expect("a barrier");
    window.flush().expect("a barrier");
    window.discard(0, 4096).expect("a discard");
    assert_eq!(below.count(RequestKind::Flushes), 2);
    assert_eq!(below.count(RequestKind::Discards), 1);
}

#[test]
fn a_window_begins_on_its_device() {
    for range in [MIB..2 * MIB, 5..5, u64::MAX - 1..u64::MAX] {
        let error = window(disk(&[], MIB), range.clone()).expect_err("it is refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{range:?}");
    }
    // A disk that was cut off: the window has only the bytes that are left.
    let window = window(disk(&[7; 100], MIB), 50..3 * MIB).expect("it begins on it");
    window.read_at(0, &mut [0; 50]).expect("what is there");
    let error = window.read_at(2 * MIB, &mut [0; 50]).expect_err("what is not there");
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

/// A GPT of four entries: 1 and 3 are used, and 4 lies past the end of the disk.
fn gpt() -> Vec<u8> {
    let mut bytes = vec![0; 4 * 512];
    protective(&mut bytes);
    let header = &mut bytes[512..1024];
    header[..8].copy_from_slice(b"EFI PART");
    header[12..16].copy_from_slice(&92u32.to_le_bytes());
    header[24..32].copy_from_slice(&1u64.to_le_bytes());
    header[72..80].copy_from_slice(&2u64.to_le_bytes());
    header[80..84].copy_from_slice(&4u32.to_le_bytes());
    header[84..88].copy_from_slice(&128u32.to_le_bytes());
    for (number, first, last, name) in
        [(0, 100u64, 199u64, "one"), (2, 300, 300, "drei\u{df}"), (3, 1 << 40, 1 << 41, "far")]
    {
        let entry = &mut bytes[1024 + number * 128..][..128];
        entry[..16].fill(1);
        entry[16..32].copy_from_slice(&std::array::from_fn::<u8, 16, _>(|at| {
            u8::try_from(at + number).expect("small")
        }));
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&last.to_le_bytes());
        for (at, unit) in name.encode_utf16().enumerate() {
            entry[56 + at * 2..][..2].copy_from_slice(&unit.to_le_bytes());
        }
    }
    mend_gpt(&mut bytes, 512);
    bytes
}

/// Makes the protective MBR, which announces a GPT.
fn protective(bytes: &mut [u8]) {
    mbr_entry(bytes, 0, 0xee, 1, u32::MAX);
}

fn mbr_entry(sector: &mut [u8], number: usize, kind: u8, first: u32, count: u32) {
    let entry = &mut sector[446 + number * 16..][..16];
    entry[4] = kind;
    entry[8..12].copy_from_slice(&first.to_le_bytes());
    entry[12..16].copy_from_slice(&count.to_le_bytes());
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
}

fn read(bytes: &[u8]) -> io::Result<Option<PartitionTable>> {
    PartitionTable::read(&*disk(bytes, MIB))
}

#[test]
fn a_gpt() {
    let table = read(&gpt()).expect("it is right").expect("there is one");
    assert_eq!((table.kind, &table.warning), (TableKind::Gpt, &None));
    let found: Vec<_> = table
        .partitions
        .iter()
        .map(|one| (one.number, one.range.clone(), &*one.label, &*one.uuid))
        .collect();
    assert_eq!(
        found,
        [
            (1, 51200..102_400, "one", "03020100-0504-0706-0809-0a0b0c0d0e0f"),
            (3, 153_600..154_112, "drei\u{df}", "05040302-0706-0908-0a0b-0c0d0e0f1011"),
        ]
    );
}

#[test]
fn a_damaged_gpt_gives_way_to_its_copy() {
    let mut bytes = gpt();
    bytes.resize(1 << 20, 0);
    // The copy: its header is in the last sector, behind its own entries.
    let copy = bytes[1024..1536].to_vec();
    let at = (1 << 20) - 1024;
    bytes[at..at + 512].copy_from_slice(&copy);
    let mut header = bytes[512..1024].to_vec();
    header[24..32].copy_from_slice(&2047u64.to_le_bytes());
    header[72..80].copy_from_slice(&2046u64.to_le_bytes());
    header[16..20].fill(0);
    let mut crc = flate2::Crc::new();
    crc.update(&header[..92]);
    header[16..20].copy_from_slice(&crc.sum().to_le_bytes());
    bytes[at + 512..].copy_from_slice(&header);
    for (place, value) in [(512 + 30, 9), (1024 + 33, 9), (512, 0)] {
        let mut bytes = bytes.clone();
        bytes[place] = value;
        let table = read(&bytes).expect("the copy is right").expect("there is one");
        assert_eq!(table.partitions.len(), 2, "byte {place}");
        assert!(table.warning.expect("a warning").contains("its copy is used"));
        bytes[at + 512 + 30] ^= 1;
        let error = read(&bytes).expect_err("both are damaged");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {place}");
    }
    // Without the protective MBR, the copy is a remnant of an older table.
    bytes[..1024].fill(0);
    assert_eq!(read(&bytes).expect("nothing is wrong"), None);
}

#[test]
fn impossible_gpts_are_refused() {
    // Number of entries, bytes of each, first sector.
    for (count, entry_bytes, first) in [
        (u32::MAX, 128u32, 2u64),
        (u32::MAX, u32::MAX, 2),
        (4, 64, 2),
        (4, 0, 2),
        (4, 128, u64::MAX),
        (4, 128, 1 << 56),
        (4, 128, 3000),
    ] {
        let mut bytes = gpt();
        bytes[512 + 80..512 + 84].copy_from_slice(&count.to_le_bytes());
        bytes[512 + 84..512 + 88].copy_from_slice(&entry_bytes.to_le_bytes());
        bytes[512 + 72..512 + 80].copy_from_slice(&first.to_le_bytes());
        mend_gpt(&mut bytes, 512);
        let error = read(&bytes).expect_err("it is refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{count} {entry_bytes} {first}");
    }
}

#[test]
fn an_mbr_with_logical_partitions() {
    let mut bytes = vec![0; 1 << 20];
    bytes[440..444].copy_from_slice(&0x1234_abcd_u32.to_le_bytes());
    mbr_entry(&mut bytes, 0, 0x83, 1, 99);
    mbr_entry(&mut bytes, 2, 0x0f, 200, 1000);
    let link = |bytes: &mut Vec<u8>, at: usize, first, next: Option<u32>| {
        let sector = &mut bytes[at * 512..][..512];
        mbr_entry(sector, 0, 0x83, first, 10);
        if let Some(next) = next {
            mbr_entry(sector, 1, 0x05, next, 20);
        }
    };
    link(&mut bytes, 200, 2, Some(500));
    // A chain may go back on the disk, if it does not return to a sector that it visited.
    link(&mut bytes, 700, 3, Some(100));
    link(&mut bytes, 300, 4, None);
    let table = read(&bytes).expect("it is right").expect("there is one");
    let found: Vec<_> = table
        .partitions
        .iter()
        .map(|one| (one.number, one.range.start / 512, one.size_bytes() / 512, &*one.uuid))
        .collect();
    assert_eq!((table.kind, table.warning), (TableKind::Mbr, None));
    assert_eq!(
        found,
        [
            (1, 1, 99, "1234abcd-01"),
            (5, 202, 10, "1234abcd-05"),
            (6, 703, 10, "1234abcd-06"),
            (7, 304, 10, "1234abcd-07"),
        ]
    );
    for next in [0, 500, 900, u32::MAX] {
        // Back to its beginning, to itself, to an empty sector, and out of the extended partition.
        let mut bytes = bytes.clone();
        link(&mut bytes, 700, 3, Some(next));
        let table = read(&bytes).expect("it is read").expect("there is one");
        assert_eq!(table.partitions.len(), 3, "{next}");
        assert!(table.warning.expect("a warning").contains("chain"), "{next}");
    }
}

/// Neither a file nor an MBR tells the size of the sectors in which the MBR counts. The caller
/// gives it.
#[test]
fn an_mbr_that_counts_in_large_sectors() {
    let mut bytes = vec![0; 1 << 20];
    mbr_entry(&mut bytes, 0, 0x83, 1, 99);
    mbr_entry(&mut bytes, 1, 0x05, 100, 50);
    mbr_entry(&mut bytes[100 * 4096..], 0, 0x83, 2, 10);
    // The sector of the chain when sectors have 512 bytes.
    mbr_entry(&mut bytes[100 * 512..], 0, 0x83, 3, 10);
    for (sector_bytes, logical) in [(4096, 102), (512, 103)] {
        let table = PartitionTable::read_mbr(&*disk(&bytes, MIB), sector_bytes);
        let table = table.expect("it is right").expect("there is one");
        let found = table.partitions.iter().map(|one| (one.number, one.range.clone()));
        let range = |first: u64, count| first * sector_bytes..(first + count) * sector_bytes;
        assert_eq!(found.collect::<Vec<_>>(), [(1, range(1, 99)), (5, range(logical, 10))]);
        assert_eq!(table.warning, None);
    }
    let table = read(&bytes).expect("it is right").expect("there is one");
    assert_eq!(table.partitions[0].range.start, 512, "a device that says nothing");
}

#[test]
fn boot_sectors_are_no_tables() {
    // Three sectors: only the two signature bytes; code in place of the entries; a protective MBR
    // without its GPT.
    let mut bytes = vec![0; 512];
    bytes[510..].copy_from_slice(&[0x55, 0xaa]);
    assert_eq!(read(&bytes).expect("nothing is wrong"), None);
    bytes[446..510].fill(0x77);
    assert_eq!(read(&bytes).expect("nothing is wrong"), None);
    bytes[446..510].fill(0);
    protective(&mut bytes);
    assert_eq!(read(&bytes).expect_err("no GPT").kind(), io::ErrorKind::InvalidData);
    for size_bytes in [0, 1, 511, 512, 513, 1024, 4096] {
        let _ = PartitionTable::read(&*disk(&gpt(), size_bytes));
    }
}

/// Seeded mutations of both tables; the fuzz target makes the same ones.
#[test]
fn hostile_tables() {
    let mut random = Random::new(0x6d62_7267);
    let mut mbr = vec![0; 8192];
    mbr_entry(&mut mbr, 0, 0x83, 1, 3);
    mbr_entry(&mut mbr, 1, 0x05, 4, 12);
    mbr_entry(&mut mbr[4 * 512..], 0, 0x83, 1, 1);
    mbr_entry(&mut mbr[4 * 512..], 1, 0x05, 4, 4);
    for round in 0..4000 {
        let mut bytes = if round % 2 == 0 { gpt() } else { mbr.clone() };
        for _ in 0..=random.below(6) {
            let at = usize::try_from(random.below(bytes.len() as u64)).expect("small");
            bytes[at] = [0, 0xff, 0x05, random.bytes(1)[0]]
                [usize::try_from(random.below(4)).expect("small")];
        }
        bodies::partition_table(&bytes);
    }
}
