//! Blocks that are freed while they are on their way home.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use offshoot_device::BlockDevice;
use parking_lot::{Condvar, Mutex};

use super::blocks::TestVolume;
use crate::log::{LoggedItem, XfsLog, XfsLogOptions};

/// A device on which writes to one place wait until they may go on.
#[derive(Debug)]
struct GatedDevice {
    inner: Arc<dyn BlockDevice>,
    place: Mutex<Option<u64>>,
    opened: Condvar,
    is_waiting: AtomicBool,
}

impl offshoot_device::Delegate for GatedDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut place = self.place.lock();
        while *place == Some(offset) {
            self.is_waiting.store(true, SeqCst);
            self.opened.wait(&mut place);
        }
        drop(place);
        self.inner.write_at(offset, bytes)
    }
}

fn commit(log: &XfsLog, item: Arc<dyn LoggedItem>) {
    let mut ticket = log.reserve(6000, 1).unwrap();
    log.commit(&mut ticket, &[item]).unwrap();
}

/// From the moment on at which it is durable that a block was freed, a file may have it. So no
/// older write to it may be under way then.
#[test]
fn freeing_is_durable_when_no_write_home_is_under_way() {
    let volume = TestVolume::new(100, |_| ());
    let block = volume.blocks(1).remove(0);
    let device = Arc::new(GatedDevice {
        inner: volume.device.clone(),
        place: Mutex::new(Some(block.place.bytes())),
        opened: Condvar::new(),
        is_waiting: AtomicBool::new(false),
    });
    let log = volume.moved_to(device.clone()).start(&XfsLogOptions::default());
    block.fill(1, b"old");
    commit(&log, block.clone());
    log.force_all().unwrap();
    let durable = log.durable();
    thread::scope(|scope| {
        scope.spawn(|| log.push_tail().unwrap());
        while !device.is_waiting.load(SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        block.cancel();
        commit(&log, block.clone());
        let force = scope.spawn(|| log.force_all().unwrap());
        thread::sleep(Duration::from_millis(100));
        let early = log.durable();
        *device.place.lock() = None;
        device.opened.notify_all();
        force.join().unwrap();
        assert_eq!(early, durable, "a write home is under way");
    });
    assert!(log.durable() > durable);
    log.unmount().unwrap();
}
