//! Compares the memory device with a plain buffer.

use std::io::IoSlice;
use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryBudget, MemoryDevice};
use offshoot_testkit::random::Random;

/// Larger than two extents, and no multiple of a page.
const DEVICE_BYTES: u64 = (2 << 20) + 70_001;

fn len_of(random: &mut Random, at: u64) -> u64 {
    let most = [3000, 40_000, 1_500_000][usize::try_from(random.below(3)).expect("small")];
    random.below(most).min(DEVICE_BYTES - at)
}

fn place(at: u64, len: u64) -> std::ops::Range<usize> {
    let small = |number: u64| usize::try_from(number).expect("small");
    small(at)..small(at + len)
}

fn judge(device: &MemoryDevice, model: &[u8], what: &str) {
    let mut bytes = vec![0; model.len()];
    device.read_at(0, &mut bytes).expect("a read of everything");
    let differs = bytes.iter().zip(model).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{what}: the first byte that differs");
}

/// Makes random writes, discards and reads on a device and on its snapshots. Each of them has a
/// buffer that shows what it must hold.
fn run(base: impl Fn(Vec<u8>) -> MemoryDevice, seed: u64, contents: Vec<u8>) {
    let mut random = Random::new(seed);
    let mut devices = vec![(base(contents.clone()), contents)];
    for step in 0..60 {
        let which = usize::try_from(random.below(devices.len() as u64)).expect("small");
        let may_copy = devices.len() < 5;
        let (device, model) = &mut devices[which];
        let at = random.below(DEVICE_BYTES);
        let len = len_of(&mut random, at);
        let what = format!("seed {seed}, step {step}");
        match random.below(10) {
            0..=3 => {
                let data = random.bytes(usize::try_from(len).expect("small"));
                let (one, two) = data.split_at(data.len() / 3);
                let bufs = [IoSlice::new(one), IoSlice::new(&[]), IoSlice::new(two)];
                device.write_vectored_at(at, &bufs).expect("a write");
                model[place(at, len)].copy_from_slice(&data);
            }
            4..=5 => {
                device.discard(at, len).expect("a discard");
                model[place(at, len)].fill(0);
            }
            6 if may_copy => {
                let copy = (device.snapshot(), model.clone());
                devices.push(copy);
            }
            _ => {
                let mut bytes = vec![1; usize::try_from(len).expect("small")];
                device.read_at(at, &mut bytes).expect("a read");
                assert!(bytes == model[place(at, len)], "{what}: a read of {len} at {at}");
            }
        }
    }
    for (number, (device, model)) in devices.iter().enumerate() {
        judge(device, model, &format!("seed {seed}, device {number}"));
    }
}

#[test]
fn does_what_a_buffer_does() {
    for seed in 0..20 {
        let contents = Random::new(!seed).bytes(usize::try_from(DEVICE_BYTES).expect("small"));
        run(|_| MemoryDevice::sparse(DEVICE_BYTES), seed, vec![0; contents.len()]);
        run(MemoryDevice::new, seed, contents.clone());
        let over = |bytes| MemoryDevice::over(Arc::new(MemoryDevice::new(bytes)));
        run(over, seed, contents);
    }
}

#[test]
fn refuses_what_ends_past_it() {
    let device = MemoryDevice::sparse(4096);
    for (at, len) in [(4095, 2), (4097, 1), (u64::MAX, 1), (u64::MAX - 1, 4)] {
        let mut buf = vec![0; usize::try_from(len).expect("small")];
        let kinds = [
            device.read_at(at, &mut buf).expect_err("a read past the end").kind(),
            device.write_at(at, &buf).expect_err("a write past the end").kind(),
            device.discard(at, len).expect_err("a discard past the end").kind(),
        ];
        assert_eq!(kinds, [std::io::ErrorKind::UnexpectedEof; 3]);
    }
    device.write_at(4096, &[]).expect("nothing at the end is inside");
}

#[test]
fn threads_write_side_by_side() {
    const THREADS: u64 = 4;
    let device = MemoryDevice::sparse(64 << 20);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let device = &device;
            scope.spawn(move || {
                // Neighbouring numbers share pages and shards.
                for number in (thread..40_000).step_by(4) {
                    let bytes = (number + 1).to_le_bytes();
                    device.write_at(number * 1000, &bytes).expect("a write");
                }
            });
        }
    });
    for number in 0..40_000u64 {
        let mut bytes = [0; 8];
        device.read_at(number * 1000, &mut bytes).expect("a read");
        assert_eq!(u64::from_le_bytes(bytes), number + 1);
    }
}

#[test]
fn a_huge_empty_device_costs_nothing() {
    let device = MemoryDevice::sparse(1 << 60);
    device.write_at((1 << 60) - 5, b"hello").expect("a write at the very end");
    let copy = device.snapshot();
    device.write_at((1 << 60) - 5, b"HELLO").expect("a write at the very end");
    let mut bytes = [1; 6];
    copy.read_at((1 << 60) - 6, &mut bytes).expect("a read");
    assert_eq!(&bytes, b"\0hello");
}

/// A discard made room for a page that the budget did not count.
#[test]
fn discards_count_for_the_budget_of_what_is_written() {
    const PAGE: u64 = 16 << 10;
    let below: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::new(vec![1; 8 << 14]));
    let budget = MemoryBudget::new(2 * PAGE);
    let device = MemoryDevice::over_within(below, &budget);
    device.discard(0, 8 * PAGE).expect("a discard takes no page");
    device.write_at(0, b"one").expect("the first page");
    device.write_at(PAGE, b"two").expect("the second page");
    device.write_at(2 * PAGE, b"three").expect_err("there is no third one");
    device.discard(0, PAGE).expect("it gives its page back");
    device.write_at(2 * PAGE, b"three").expect("the second page");
    device.write_at(0, b"one").expect_err("there is no third one");
}
