//! Images that can be damaged thousands of times without a copy.

#![allow(dead_code, reason = "each of the programs that share this calls a part of it")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::BlockDevice;

const PAGE: usize = 4096;

/// An image in memory that does not store its pages of zeros.
#[derive(Debug)]
pub(crate) struct SparseImage {
    size: u64,
    pages: HashMap<u64, Box<[u8]>>,
}

impl SparseImage {
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut pages = HashMap::new();
        let mut page = vec![0; PAGE];
        for at in (0..size).step_by(PAGE) {
            let len = usize::try_from((size - at).min(PAGE as u64)).expect("a page");
            file.read_exact(&mut page[..len])?;
            page[len..].fill(0);
            if page.iter().any(|&byte| byte != 0) {
                pages.insert(at / PAGE as u64, page.clone().into_boxed_slice());
            }
        }
        Ok(Self { size, pages })
    }

    /// The offsets of the pages that hold anything but zeros, in bytes.
    pub(crate) fn used(&self) -> Vec<u64> {
        let mut used: Vec<_> = self.pages.keys().map(|page| page * PAGE as u64).collect();
        used.sort_unstable();
        used
    }
}

/// An image with changes over it.
#[derive(Clone, Debug)]
pub(crate) struct Patched {
    image: Arc<SparseImage>,
    pages: HashMap<u64, Vec<u8>>,
    size: u64,
}

impl Patched {
    /// `image` as it is.
    pub(crate) fn new(image: &Arc<SparseImage>) -> Self {
        Self { image: image.clone(), pages: HashMap::new(), size: image.size }
    }

    /// Ends the image after `size` bytes.
    pub(crate) fn truncate(&mut self, size: u64) {
        self.size = self.size.min(size);
    }

    pub(crate) fn write(&mut self, offset: u64, mut bytes: &[u8]) {
        let mut at = offset;
        while !bytes.is_empty() {
            let (number, within) = split(at);
            let (now, rest) = bytes.split_at(bytes.len().min(PAGE - within));
            let original = self.image.pages.get(&number);
            let page = self
                .pages
                .entry(number)
                .or_insert_with(|| original.map_or_else(|| vec![0; PAGE], |page| page.to_vec()));
            page[within..within + now.len()].copy_from_slice(now);
            at += now.len() as u64;
            bytes = rest;
        }
    }

    /// Makes `file`, which holds the image, hold the damaged image.
    pub(crate) fn apply(&self, file: &File) -> io::Result<()> {
        for (number, page) in &self.pages {
            file.write_all_at(page, number * PAGE as u64)?;
        }
        file.set_len(self.size)
    }

    /// Makes `file` hold the undamaged image again.
    pub(crate) fn undo(&self, file: &File) -> io::Result<()> {
        file.set_len(self.image.size)?;
        let zeros = vec![0; PAGE];
        for &number in self.pages.keys() {
            let page = self.image.pages.get(&number).map_or(&zeros[..], |page| &page[..]);
            file.write_all_at(page, number * PAGE as u64)?;
        }
        for (number, page) in &self.image.pages {
            if (number + 1) * PAGE as u64 > self.size {
                file.write_all_at(page, number * PAGE as u64)?;
            }
        }
        file.set_len(self.image.size)
    }
}

/// The number of the page that holds a byte, and the offset in the page.
fn split(at: u64) -> (u64, usize) {
    (at / PAGE as u64, usize::try_from(at % PAGE as u64).expect("within a page"))
}

impl BlockDevice for Patched {
    fn name(&self) -> &'static str {
        "hostile.img"
    }

    fn size_bytes(&self) -> u64 {
        self.size
    }

    fn write_at(&self, _offset: u64, _buf: &[u8]) -> io::Result<()> {
        panic!("a volume that is opened for reading is written")
    }

    fn flush(&self) -> io::Result<()> {
        panic!("a volume that is opened for reading is flushed")
    }

    fn discard(&self, _offset: u64, _len: u64) -> io::Result<()> {
        panic!("of a volume that is opened for reading something is discarded")
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buf.len() as u64).is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut at = offset;
        let mut rest = buf;
        while !rest.is_empty() {
            let (number, within) = split(at);
            let (now, more) = {
                let len = rest.len().min(PAGE - within);
                rest.split_at_mut(len)
            };
            let patched = self.pages.get(&number).map(|page| &page[..]);
            match patched.or_else(|| self.image.pages.get(&number).map(|page| &page[..])) {
                Some(page) => now.copy_from_slice(&page[within..within + now.len()]),
                None => now.fill(0),
            }
            at += now.len() as u64;
            rest = more;
        }
        Ok(())
    }
}
