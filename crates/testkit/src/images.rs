//! Sparse image files in a temporary directory, removed on drop.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offshoot_device::{BlockDevice, FileDevice};
use tempfile::TempDir;

use crate::run::try_run;
use crate::scratch_dir;

/// The image files of one volume.
#[derive(Debug)]
pub struct ImageFiles {
    images: Vec<PathBuf>,
    dir: TempDir,
}

impl ImageFiles {
    /// `count` empty images of `size_bytes` each, all of them holes.
    #[must_use]
    pub fn create(count: usize, size_bytes: u64) -> Self {
        let mut files = Self { images: Vec::new(), dir: scratch_dir() };
        (0..count).for_each(|_| files.add(size_bytes));
        files
    }

    /// One image that belongs to another owner, such as a file of a mount.
    #[must_use]
    pub fn of_other(image: PathBuf) -> Self {
        Self { images: vec![image], dir: scratch_dir() }
    }

    /// Copies these images as they are now. They may be mounted meanwhile.
    #[must_use]
    pub fn copy(&self) -> Self {
        self.copy_with("--sparse=always").unwrap_or_else(|reason| panic!("{reason}"))
    }

    /// Copies each image as it is at one moment, also while it is written. `None` where the host
    /// does not share blocks of files: `OFFSHOOT_TEST_DIR` can name a directory where it does.
    #[must_use]
    pub fn copy_at_once(&self) -> Option<Self> {
        self.copy_with("--reflink=always").ok()
    }

    fn copy_with(&self, option: &str) -> Result<Self, String> {
        let dir = scratch_dir();
        let mut images = Vec::new();
        for image in &self.images {
            let copy = dir.path().join(image.file_name().expect("a file name"));
            try_run("cp", &[option.as_ref(), image.as_os_str(), copy.as_os_str()])?;
            images.push(copy);
        }
        Ok(Self { images, dir })
    }

    /// Adds one more image.
    pub fn add(&mut self, size_bytes: u64) {
        let path = self.dir.path().join(format!("member{}.img", self.images.len()));
        let file = File::create(&path).expect("an image file");
        file.set_len(size_bytes).expect("a sparse image file");
        self.images.push(path);
    }

    /// The image files, in the order in which they became members.
    #[must_use]
    pub fn images(&self) -> &[PathBuf] {
        &self.images
    }

    /// Copies the contents of these devices to the images, which must be empty.
    ///
    /// # Errors
    /// Those of the devices and of the images.
    pub fn fill(&self, devices: &[&dyn BlockDevice]) -> std::io::Result<()> {
        let mut bytes = vec![0; 256 << 10];
        for (device, image) in devices.iter().zip(&self.images) {
            let file = File::options().write(true).open(image)?;
            for offset in (0..device.size_bytes()).step_by(bytes.len()) {
                device.read_at(offset, &mut bytes)?;
                if bytes.iter().any(|&byte| byte != 0) {
                    file.write_all_at(&bytes, offset)?;
                }
            }
        }
        Ok(())
    }

    /// All members as devices for reading.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        self.images.iter().map(|image| device(image)).collect()
    }

    /// All members as devices for writing.
    #[must_use]
    pub fn writable_devices(&self) -> Vec<Arc<dyn BlockDevice>> {
        let open =
            |image| FileDevice::open_writable(image).expect("no other program uses the image");
        self.images.iter().map(|image| Arc::new(open(image)) as Arc<dyn BlockDevice>).collect()
    }

    /// The members with these indexes as devices for reading.
    #[must_use]
    pub fn some_devices(&self, members: &[usize]) -> Vec<Arc<dyn BlockDevice>> {
        members.iter().map(|&index| device(&self.images[index])).collect()
    }
}

fn device(image: &Path) -> Arc<dyn BlockDevice> {
    Arc::new(FileDevice::open(image).expect("an image that was just made opens"))
}
