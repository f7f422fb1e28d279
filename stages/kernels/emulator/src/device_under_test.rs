//! What runs kernels for devices in tests.

use std::sync::OnceLock;

use candle_core::Device;
use flow_kernels::device::DeviceChoice;

use super::emulator;

/// What runs the kernels for devices in tests: the emulator, or the device that the environment variable
/// `FLOW_TEST_DEVICE` names (`cuda`, `cuda:1`).
pub struct DeviceUnderTest(Option<Device>);

impl DeviceUnderTest {
    /// The one of this process.
    pub fn get() -> &'static Self {
        static CHOSEN: OnceLock<DeviceUnderTest> = OnceLock::new();
        CHOSEN.get_or_init(|| match std::env::var("FLOW_TEST_DEVICE") {
            Ok(name) if name != "emulator" => {
                let choice: DeviceChoice = name.parse().unwrap();
                assert!(choice != DeviceChoice::Cpu, "the CPU is what devices are compared with");
                DeviceUnderTest(Some(choice.open(0).unwrap()))
            }
            _ => DeviceUnderTest(None),
        })
    }

    pub fn is_emulated(&self) -> bool {
        self.0.is_none()
    }

    /// Does `work` with the device that tensors are to be on: under emulation that is the CPU.
    pub fn run<R>(&self, work: impl FnOnce(&Device) -> R) -> R {
        match &self.0 {
            Some(device) => work(device),
            None => emulator::with(true, || work(&Device::Cpu)),
        }
    }
}
