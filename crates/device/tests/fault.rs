//! A fault hits exactly the request or the range that the test chose.

use std::io::{self, IoSlice};
use std::sync::Arc;

use offshoot_device::{
    BlockDevice, CrashDevice, CrashEntry, Fault, FaultDevice, MemoryDevice, RequestKind,
};

const EIO: i32 = 5;

fn device() -> (Arc<CrashDevice>, FaultDevice) {
    let below = Arc::new(CrashDevice::new(Arc::new(MemoryDevice::sparse(1 << 20))));
    (below.clone(), FaultDevice::new(below))
}

fn is_eio(result: io::Result<()>) -> bool {
    result.is_err_and(|error| error.raw_os_error() == Some(EIO))
}

fn bytes(device: &dyn BlockDevice, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    device.read_at(offset, &mut bytes).expect("a sound read");
    bytes
}

/// Makes a write, a flush and a read, three times. Returns the numbers of those that failed.
fn workload(device: &dyn BlockDevice) -> Vec<usize> {
    let mut failed = Vec::new();
    for round in 0..3 {
        let results = [
            device.write_at(round as u64 * 8192, &[7; 4096]),
            device.flush(),
            device.read_at(0, &mut [0; 16]),
        ];
        for (at, result) in results.into_iter().enumerate() {
            if result.is_err() {
                assert!(is_eio(result));
                failed.push(round * 3 + at);
            }
        }
    }
    failed
}

#[test]
fn every_request_can_be_made_to_fail() {
    let (_, counter) = device();
    assert_eq!(workload(&counter), []);
    let counts = [RequestKind::Reads, RequestKind::Writes, RequestKind::Flushes, RequestKind::All]
        .map(|requests| counter.count(requests));
    assert_eq!(counts, [3, 3, 3, 9]);

    for fault in [Fault::Error, Fault::Short] {
        for number in 0..9 {
            let (_, device) = device();
            device.strike(RequestKind::All, number, fault);
            assert_eq!(workload(&device), [usize::try_from(number).expect("small")]);
        }
        for (kind, at) in
            [(RequestKind::Writes, 0), (RequestKind::Flushes, 1), (RequestKind::Reads, 2)]
        {
            for number in 0..3 {
                let (_, device) = device();
                device.strike(kind, number as u64, fault);
                assert_eq!(workload(&device), [number * 3 + at]);
            }
        }
    }
}

#[test]
fn an_error_writes_nothing_and_a_short_write_some_sectors() {
    let (below, device) = device();
    device.strike(RequestKind::Writes, 0, Fault::Error);
    assert!(is_eio(device.write_at(0, &[1; 2048])));
    assert_eq!(bytes(&*below, 0, 2048), [0; 2048]);

    device.strike(RequestKind::Writes, 1, Fault::Short);
    let bufs = [IoSlice::new(&[1; 1000]), IoSlice::new(&[2; 1000])];
    // The write ends at 2100. Its middle at 1100 is in the sector that begins at 1024.
    assert!(is_eio(device.write_vectored_at(100, &bufs)));
    let after = bytes(&*below, 0, 2200);
    assert_eq!((after[99], after[100], after[1023], after[1024]), (0, 1, 1, 0));

    // A write inside one sector is done or not done, never torn.
    device.strike(RequestKind::Writes, 2, Fault::Short);
    assert!(is_eio(device.write_at(4096, &[3; 512])));
    assert_eq!(bytes(&*below, 4096, 512), [0; 512]);

    device.write_vectored_at(100, &bufs).expect("the fault is over");
    assert_eq!(bytes(&*below, 1099, 2), [1, 2]);
}

#[test]
fn a_discard_fails_and_does_nothing() {
    let (below, device) = device();
    device.strike(RequestKind::Discards, 1, Fault::Error);
    device.add(8192..8193, Fault::Short);
    device.add(0..1, Fault::Garbage);
    assert!(device.discard(0, 4096).is_ok() && is_eio(device.discard(0, 4096)));
    assert!(is_eio(device.discard(4096, 8192)) && device.discard(0, 4096).is_ok());
    assert_eq!((device.count(RequestKind::Discards), below.log().entries().len()), (4, 2));
}

#[test]
fn garbage_is_silent() {
    let (below, device) = device();
    device.write_at(0, &[0x0f; 1024]).expect("a sound write");
    device.strike(RequestKind::Reads, 0, Fault::Garbage);
    assert_eq!(bytes(&device, 0, 1024), [0xf0; 1024]);
    assert_eq!(bytes(&device, 0, 1024), [0x0f; 1024]);

    device.strike(RequestKind::Writes, 1, Fault::Garbage);
    device.write_at(0, &[0x01; 10]).expect("it seems to succeed");
    assert_eq!(bytes(&*below, 0, 11), [[0xfe; 10].as_slice(), &[0x0f]].concat());

    device.strike(RequestKind::Flushes, 0, Fault::Garbage);
    device.flush().expect("it seems to succeed");
    let barriers = || {
        let is_barrier = |entry: &&CrashEntry| matches!(entry, CrashEntry::Barrier { .. });
        below.log().entries().iter().filter(is_barrier).count()
    };
    assert_eq!(barriers(), 0);
    device.flush().expect("a sound flush");
    assert_eq!(barriers(), 1);
}

#[test]
fn a_place_is_faulty_for_everybody() {
    let (below, device) = device();
    device.add(1000..1001, Fault::Error);
    device.add(4096..8192, Fault::Short);
    device.add(10_000..10_010, Fault::Garbage);

    assert!(is_eio(device.read_at(0, &mut [0; 1001])));
    device.read_at(0, &mut [0; 1000]).expect("a read in front of the place");
    device.read_at(1001, &mut [0; 1000]).expect("a read behind it");
    assert!(is_eio(device.write_at(1000, &[1])));
    assert!(is_eio(device.write_at(0, &[1; 4096])));
    assert_eq!(bytes(&*below, 0, 4096), [0; 4096]);

    assert!(is_eio(device.write_at(2048, &[1; 4096])));
    assert_eq!(bytes(&*below, 2048, 2049), [[1; 2048].as_slice(), &[0]].concat());

    device.write_at(9990, &[1; 40]).expect("writes do not notice");
    let read = bytes(&device, 9990, 40);
    assert_eq!((read[9], read[10], read[19], read[20]), (1, 254, 254, 1));

    // When two faults lie in the range of a write, the first one takes effect.
    device.add(6144..6145, Fault::Short);
    device.strike(RequestKind::Writes, device.count(RequestKind::Writes), Fault::Short);
    assert!(is_eio(device.write_at(3584, &[2; 4096])));
    assert_eq!(bytes(&*below, 4095, 2), [2, 0]);
}

#[test]
fn a_place_can_be_bad_for_one_kind_of_requests() {
    let device = FaultDevice::new(Arc::new(MemoryDevice::new(vec![7; 8192])));
    device.add_to(RequestKind::Writes, 4096..4608, Fault::Error);
    let mut buf = [0; 1024];
    device.read_at(4096, &mut buf).expect("it is read");
    assert_eq!(buf, [7; 1024]);
    assert!(device.write_at(4500, &buf).is_err());
    device.write_at(4608, &buf).expect("beside it");
}
